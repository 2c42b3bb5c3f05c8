# SPDX-License-Identifier: Apache-2.0
"""Loops compiled to machine code by numba."""

from collections.abc import Callable
from typing import TypeVar

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """``function``, compiled when first called (about a second each) and from then on read from disk.

    The machine code is kept where Python keeps its own byte code, beside the source, or in the user's cache folder: who
    can write there could change the program anyhow. Where neither can be written, every process compiles anew.
    """
    try:
        made: _Function = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder for its cache
        made = njit(nogil=True)(function)
    return made
