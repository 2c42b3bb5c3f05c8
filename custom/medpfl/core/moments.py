# SPDX-License-Identifier: Apache-2.0
"""Mean and variance of every channel of what enters some layers, while a network runs over any number of batches.

The layers are watched by forward pre-hooks, so a network needs no method of its own for it. Batches are merged by the
pairwise update of Chan, Golub and LeVeque (1979) in float64: no cancellation, whatever the batches' sizes and order.
"""

import math
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

Floats = NDArray[np.float64]
_WIDTH = 256  # sums that fit the processor's fastest memory
_NATIVE = (torch.float32, torch.float64)
_BLOCK = 2**24  # values that are float64 at a time, 128 MiB


class Moments:
    """Streaming mean and population variance of C channels, float64."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = np.zeros(0)
        self._settled = 0
        """Of the ``count``, in ``_mean`` and ``_squares``; the rest is in ``_elsewhere``."""
        self._elsewhere: tuple[Tensor, Tensor] | None = None

    def add(self, values: Tensor) -> None:
        """Take in B x C x n values, B and n >= 1."""
        if not self.count:
            self._mean, self._squares = np.zeros(values.shape[1]), np.zeros(values.shape[1])
        if values.device.type == "cpu" and values.dtype in _NATIVE:
            by_place = values.transpose(1, 2)
            if by_place.is_contiguous() and not values.is_contiguous():  # images with channels last
                batch, places, channels = by_place.shape
                wide = by_place.numpy().reshape(batch, -1, channels * math.gcd(places, max(1, _WIDTH // channels)))
                _take_in_by_place(wide, self._settled, self._mean, self._squares)
            else:
                _take_in(values.contiguous().numpy(), self._settled, self._mean, self._squares)
            self._settled += values.shape[0] * values.shape[2]
        else:
            self._add_there(values)
        self.count += values.shape[0] * values.shape[2]

    def _add_there(self, values: Tensor) -> None:
        """On the values' device, which nothing waits for until the result is read; in blocks."""
        taken = self.count - self._settled
        for part in torch.split(values, max(1, _BLOCK // max(1, values[0].numel()))):
            block, size = part.to(torch.float64, copy=True), part.shape[0] * part.shape[2]
            mean = block.mean(dim=(0, 2))
            squares = block.sub_(mean[:, None]).square_().sum(dim=(0, 2))
            if self._elsewhere is not None:
                before, so_far = self._elsewhere
                shift = mean - before
                mean = before + shift * (size / (taken + size))
                squares = so_far + squares + shift * shift * (taken * (size / (taken + size)))
            self._elsewhere, taken = (mean, squares), taken + size

    def _settle(self) -> None:
        if self._elsewhere is not None:
            mean, squares = (each.cpu().numpy() for each in self._elsewhere)
            _merge(self._settled, self._mean, self._squares, self.count - self._settled, mean, squares)
            self._settled, self._elsewhere = self.count, None

    @property
    def mean(self) -> Tensor:
        """C values."""
        self._settle()
        return torch.from_numpy(self._mean)

    @property
    def variance(self) -> Tensor:
        """C values, >= 0: divided by the number of values, not by one less."""
        self._settle()
        return torch.from_numpy(self._squares / self.count)


def entering(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """What a layer is given first, with the name of its argument (``layer(input=x)``) or without."""
    first: Tensor = args[0] if args else next(iter(named.values()))
    return first


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
            module.register_forward_pre_hook(self._hook(self._moments[path]), with_kwargs=True)
            for path, module in self._layers.items()
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _hook(moments: Moments) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            inputs = entering(args, named).detach()
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
            found[f"{path}.mean"], found[f"{path}.variance"] = moments.mean, moments.variance
        return found


@compiled
def _merge(count: int, mean: Floats, squares: Floats, size: int, other_mean: Floats, other_squares: Floats) -> None:
    """Chan, Golub and LeVeque's update, in place; ``squares`` are sums of squared differences from the mean."""
    total = count + size
    for channel in range(len(mean)):
        shift = other_mean[channel] - mean[channel]
        mean[channel] += shift * (size / total)
        squares[channel] += other_squares[channel] + shift * shift * (count * (size / total))


@compiled
def _summed(
    count: int, mean: Floats, squares: Floats, size: int, centre: Floats, total: Floats, square: Floats
) -> None:
    """Merge sums of differences from ``centre`` and of their squares."""
    for channel in range(len(mean)):
        square[channel] = max(0.0, square[channel] - total[channel] * total[channel] / size)
        total[channel] = centre[channel] + total[channel] / size
    _merge(count, mean, squares, size, total, square)


@partial(compiled, reordered_sums=True)
def _take_in(values: NDArray[Any], count: int, mean: Floats, squares: Floats) -> None:
    """``Moments.add``: reads every value once, which is why a statistics pass costs about as much as an evaluation.
    Differences are taken from a number near the mean, so that they do not cancel."""
    rows, channels, places = values.shape
    size = rows * places
    centre, total, square = mean.copy(), np.zeros(channels), np.zeros(channels)
    if count == 0:
        for channel in range(channels):
            for place in range(places):
                centre[channel] += np.float64(values[0, channel, place])
            centre[channel] /= places
    for row in range(rows):  # in the order of the memory: twice as fast for small images as channel by channel
        for channel in range(channels):
            line, middle = values[row, channel], centre[channel]
            partial_total = 0.0
            partial_square = 0.0
            for place in range(places):
                difference = np.float64(line[place]) - middle
                partial_total += difference
                partial_square += difference * difference
            total[channel] += partial_total
            square[channel] += partial_square
    _summed(count, mean, squares, size, centre, total, square)


@partial(compiled, reordered_sums=True)
def _take_in_by_place(values: NDArray[Any], count: int, mean: Floats, squares: Floats) -> None:
    """The same for values whose channels lie side by side: B x n / k x k C, k places of a row in one go."""
    rows, steps, width = values.shape
    channels = len(mean)
    size = rows * steps * (width // channels)
    centre, total, square = mean.copy(), np.zeros(channels), np.zeros(channels)
    if count == 0:
        for step in range(steps):
            for item in range(width):
                centre[item % channels] += np.float64(values[0, step, item])
        for channel in range(channels):
            centre[channel] /= steps * (width // channels)
    wide, totals, squared = np.zeros(width), np.zeros(width), np.zeros(width)
    for item in range(width):
        wide[item] = centre[item % channels]
    for row in range(rows):
        for step in range(steps):
            line = values[row, step]
            for item in range(width):
                difference = np.float64(line[item]) - wide[item]
                totals[item] += difference
                squared[item] += difference * difference
    for item in range(width):
        total[item % channels] += totals[item]
        square[item % channels] += squared[item]
    _summed(count, mean, squares, size, centre, total, square)
