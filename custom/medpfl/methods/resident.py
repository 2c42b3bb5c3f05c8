# SPDX-License-Identifier: Apache-2.0
"""What of a hospital's training data lies on its GPU, so that one copy serves several steps and several networks."""

from collections.abc import Callable

import torch
from torch import Tensor

from medpfl.core.devices import moved
from medpfl.data.samples import Samples

OnDevice = tuple[Tensor, Tensor, Tensor]
"""A batch's inputs and targets on the training device, and on the CPU what each sample counts in its loss."""


class Resident:
    """The training samples, where they fit; else the batches of the round, as far as they fit. Whoever is given one
    must not change it in place.

    Args:
        device: on which networks are trained.
        most: bytes; 0: nothing is kept.
    """

    def __init__(self, device: torch.device, most: int = 0) -> None:
        self._device, self._most = device, most
        self._samples: tuple[Samples, tuple[Tensor, Tensor] | None] | None = None
        self._round, self._left = 0, most
        self._batches: dict[tuple[str, int, bytes], OnDevice] = {}

    def whole(self, samples: Samples) -> tuple[Tensor, Tensor] | None:
        """All inputs and all targets on the device, copied once in this process; None: they do not fit, or lie in a
        file or as whole cases, of which every step shows other patches."""
        if self._samples is None or self._samples[0] is not samples:
            inputs, targets = samples.inputs, samples.targets
            held = None
            if isinstance(inputs, Tensor) and isinstance(targets, Tensor) and _size(inputs, targets) <= self._most:
                held = moved(inputs, self._device), moved(targets, self._device)
            self._samples = samples, held
        return self._samples[1]

    def batch(self, round_number: int, key: tuple[str, int, bytes], make: Callable[[], OnDevice]) -> OnDevice:
        """What ``make`` returned for this key in this round; beyond the budget it is made again.

        Args:
            key: all that ``make`` depends on within the round: the purpose, the step and the samples' numbers.
        """
        if round_number != self._round:
            self.forget_round()
            self._round = round_number
        if key in self._batches:
            return self._batches[key]
        made = make()
        size = _size(*made[:2])
        if size <= self._left:
            self._left -= size
            self._batches[key] = made
        return made

    def forget_round(self) -> None:
        """Give the memory of the round's batches back."""
        self._batches.clear()
        self._left = self._most


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
