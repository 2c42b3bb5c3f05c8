# SPDX-License-Identifier: Apache-2.0
"""Mean and variance of every channel of what enters some layers, while a network runs over any number of batches.

The layers are watched by forward pre-hooks, so a network needs no method of its own for it. Batches are merged by the
pairwise update of Chan, Golub and LeVeque (1979) in float64: no cancellation, whatever the batches' sizes and order.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError

_BLOCK_VALUES = 1 << 16  # half a megabyte: what fits into a cache is quicker than 4 MB by a half


class Moments:
    """Streaming mean and population variance of C channels, float64."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = torch.zeros((), dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Take in C x n values, n >= 1; a part at a time, so that the float64 copies stay small."""
        for part in torch.split(values, max(1, _BLOCK_VALUES // len(values)), dim=1):
            self._add(part.to(torch.float64, copy=True))

    def _add(self, values: Tensor) -> None:
        size = values.shape[1]
        mean = values.sum(dim=1) / size
        values.sub_(mean[:, None])
        squares = torch.linalg.norm(values, dim=1).square()  # 20 times as fast as torch.var_mean
        total = self.count + size
        shift = mean - self._mean
        self._mean = self._mean + shift * (size / total)
        self._squares = self._squares + squares + shift.square() * (self.count * size / total)
        self.count = total

    @property
    def mean(self) -> Tensor:
        """C values."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """C values, >= 0: divided by the number of values, not by one less."""
        return self._squares / self.count


class InputMoments:
    """Watches modules of a network while it runs: ``with InputMoments(layers) as watched: network(batch) ...``

    The channels are the second axis, for a linear layer the last one; all other axes are merged.

    Args:
        layers: path to module, as ``named_modules`` gives them.
    """

    def __init__(self, layers: Mapping[str, nn.Module]):
        self._layers = dict(layers)
        self._moments = {path: Moments() for path in layers}

    def __enter__(self) -> "InputMoments":
        self._handles = [
            module.register_forward_pre_hook(self._hook(self._moments[path])) for path, module in self._layers.items()
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _hook(moments: Moments) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs = args[0].detach()
            axis = -1 if isinstance(module, nn.Linear) else 1
            moments.add(inputs.movedim(axis, 0).flatten(1))

        return keep

    def result(self) -> dict[str, Tensor]:
        """``<path>.mean`` and ``<path>.variance`` of every layer: C float64 values each, on the CPU.

        Raises:
            ConfigError: nothing passed through a layer.
        """
        found = {}
        for path, moments in self._moments.items():
            if not moments.count:
                raise ConfigError(f"nothing passed through layer '{path}', so its inputs have no statistics")
            found[f"{path}.mean"], found[f"{path}.variance"] = moments.mean.cpu(), moments.variance.cpu()
        return found
