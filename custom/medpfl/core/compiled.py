# SPDX-License-Identifier: Apache-2.0
"""Loops compiled to machine code by numba."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function, reordered_sums: bool = False) -> _Function:
    """``function``, compiled when first called (about a second each) and from then on read from disk.

    The machine code is kept where Python keeps its own byte code, beside the source, or in the user's cache folder: who
    can write there could change the program anyhow. Where neither can be written, every process compiles anew.

    Args:
        reordered_sums: let the compiler add up in another order than written, several values at a time.
    """
    how: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"} if reordered_sums else False}
    try:
        made: _Function = njit(cache=True, **how)(function)
    except RuntimeError:  # numba found no folder for its cache
        made = njit(**how)(function)
    return made
