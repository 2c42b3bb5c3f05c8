# SPDX-License-Identifier: Apache-2.0
"""Mean and variance of every channel of what enters some layers, while a network runs over any number of batches.

The layers are watched by forward pre-hooks, so a network needs no method of its own for it. Batches are merged by the
pairwise update of Chan, Golub and LeVeque (1979) in float64: no cancellation, whatever the batches' sizes and order.
"""

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medpfl.core.compiled import compiled
from medpfl.core.errors import ConfigError

_NATIVE = (torch.float32, torch.float64)


class Moments:
    """Streaming mean and population variance of C channels, float64."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = torch.zeros((), dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Take in B x C x n values, B and n >= 1."""
        size = values.shape[0] * values.shape[2]
        if values.device.type == "cpu" and values.dtype in _NATIVE:
            sums, squares, centre = (torch.zeros(values.shape[1], dtype=torch.float64) for _ in range(3))
            centre += self._mean if self.count else values[0].mean(dim=1, dtype=torch.float64)
            _add_up(values.contiguous().numpy(), centre.numpy(), sums.numpy(), squares.numpy())
            squares = (squares - sums.square() / size).clamp_min(0)
            mean = centre + sums / size
        else:
            values = values.to(torch.float64, copy=True)
            mean = values.mean(dim=(0, 2))
            squares = values.sub_(mean[:, None]).square_().sum(dim=(0, 2))
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
            if isinstance(module, nn.Linear):
                inputs = inputs.flatten(0, -2)
            moments.add(inputs.flatten(2) if inputs.dim() > 2 else inputs[:, :, None])

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


@partial(compiled, reordered_sums=True)
def _add_up(
    values: NDArray[Any], centre: NDArray[np.float64], sums: NDArray[np.float64], squares: NDArray[np.float64]
) -> None:
    """Add to C sums and sums of squares the differences of B x C x n values from ``centre``, which is to be near the
    mean: reading them once, a statistics pass costs no more than an evaluation does."""
    for row in range(values.shape[0]):
        for channel in range(values.shape[1]):
            around = centre[channel]
            total = 0.0
            square = 0.0
            for place in range(values.shape[2]):
                difference = np.float64(values[row, channel, place]) - around
                total += difference
                square += difference * difference
            sums[channel] += total
            squares[channel] += square
