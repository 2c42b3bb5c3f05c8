# SPDX-License-Identifier: Apache-2.0
"""How the classes of pixels or voxels follow from the outputs of a network that segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


UNDECIDED = 255
"""In place of a class, where an output is no number; it would be the background's, as of a model that finds nothing."""


def undecided(outputs: Tensor, found: Tensor) -> Tensor:
    """The classes ``found`` of outputs N x K x ..., with ``UNDECIDED`` where one of these is NaN or infinite."""
    return found.masked_fill(~outputs.isfinite().all(dim=1), UNDECIDED)


@dataclass(frozen=True)
class ByClass:
    """An output a class, whose softmax are probabilities that sum to 1; the most probable class counts."""

    exclusive: ClassVar[bool] = True

    def shares(self, outputs: Tensor) -> Tensor:
        """Probabilities, N x K x ..."""
        return outputs.float().softmax(dim=1)

    def classes(self, shares: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The class of each pixel or voxel, of probabilities K x ..."""
        found: NDArray[np.uint8] = shares.argmax(axis=0).astype(np.uint8)
        return found


@dataclass(frozen=True)
class ByRegion:
    """An output a region, whose sigmoid is the probability of being in it; regions overlap, each a union of labels.

    Attributes:
        order: the label that is written where each region is found, one region after another: the later overwrites the
            earlier (nnU-Net's ``regions_class_order``).
    """

    exclusive: ClassVar[bool] = False
    order: tuple[int, ...]

    def shares(self, outputs: Tensor) -> Tensor:
        """Probabilities, N x R x ..."""
        return outputs.float().sigmoid()

    def classes(self, shares: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The label of each pixel or voxel, of probabilities R x ..."""
        found = np.zeros(shares.shape[1:], np.uint8)
        for label, share in zip(self.order, shares, strict=True):
            found[share > 0.5] = label
        return found

    def decided(self, outputs: Tensor) -> Tensor:
        """The same of outputs N x R x ... on their device, uint8; ``UNDECIDED`` where one is no number."""
        import torch

        found = torch.zeros(outputs.shape[0], *outputs.shape[2:], dtype=torch.uint8, device=outputs.device)
        for number, label in enumerate(self.order):
            found[outputs[:, number] > 0] = label
        return undecided(outputs, found)


Readout = ByClass | ByRegion
