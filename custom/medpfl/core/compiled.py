# SPDX-License-Identifier: Apache-2.0
"""Loops compiled to machine code by numba, which takes half a second to import: only who calls one waits for it."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar, cast

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function, reordered_sums: bool = False) -> _Function:
    """``function``, compiled when first called (about a second each) and from then on read from disk.

    The machine code is kept where Python keeps its own byte code, beside the source, or in the user's cache folder: who
    can write there could change the program anyhow. Where neither can be written, every process compiles anew.

    Args:
        reordered_sums: let the compiler add up in another order than written, several values at a time.
    """
    return cast(_Function, _Later(function, reordered_sums))


class _Later(Generic[_Arguments, _Result]):
    """Becomes numba's function at the first call, under the name that it has in its module."""

    def __init__(self, function: Callable[_Arguments, _Result], reordered_sums: bool):
        self._function = function
        self._fastmath = {"reassoc", "nsz", "contract"} if reordered_sums else False

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return self._made()(*args, **kwargs)

    def _made(self) -> Callable[_Arguments, _Result]:
        from numba import njit

        names, module = self._function.__code__.co_names, self._function.__globals__
        for name in names:  # numba knows only its own functions in what it compiles
            if isinstance(called := module.get(name), _Later):
                called._made()
        try:
            made: Callable[_Arguments, _Result] = njit(cache=True, nogil=True, fastmath=self._fastmath)(self._function)
        except RuntimeError:  # numba found no folder for its cache
            made = njit(nogil=True, fastmath=self._fastmath)(self._function)
        module[self._function.__name__] = made
        return made
