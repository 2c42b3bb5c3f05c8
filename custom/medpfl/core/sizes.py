# SPDX-License-Identifier: Apache-2.0
"""Networks that are refused before their memory is taken."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from medpfl.core.errors import ConfigError

_LEAST = 1000
"""Entries that a tensor counts for at least: many small ones cost, too."""
_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
"""What layers make their parameters and buffers with."""


class TooLarge(ConfigError):
    """A job's networks have more entries than they may."""


class Bounded(TorchFunctionMode):
    """While it is entered, tensors that layers make may have ``most`` entries altogether.

    Raises:
        TooLarge: more were asked for, before they are made.
    """

    def __init__(self, most: int):
        super().__init__()
        self._most, self._left = most, most

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _MAKERS:
            shape = (kwargs or {}).get("size", args)
            lengths = shape[0] if shape and isinstance(shape[0], list | tuple) else shape
            self._left -= max(math.prod(lengths), _LEAST)  # torch.Size counts in 64 bits
            if self._left < 0:
                raise TooLarge(f"the job's networks have more than {self._most} entries")
        return func(*args, **(kwargs or {}))
