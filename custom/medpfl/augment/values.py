# SPDX-License-Identifier: Apache-2.0
"""Augmentations of a table's rows and of windows of recordings; they refuse images.

Values are what networks see: features and channels with the training part's mean 0 and deviation 1.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from medpfl.augment.contract import Augmentation, Range, applied, plain
from medpfl.core.errors import ConfigError


class Values(Augmentation):
    """Changes the values of a row, F, or of a window, C x length."""

    def check_axes(self, axes: int) -> None:
        if axes > 1:
            raise ConfigError(f"{type(self).__name__} changes rows of tables and windows of recordings, no images")

    @abstractmethod
    def transforms(self, length: int, row: bool) -> list[Any]:
        """MONAI's, one after another, of a window of that length, or of a row of so many features, as one channel."""

    def change(self, image: Tensor, mask: Tensor | None, rng: np.random.RandomState) -> tuple[Tensor, Tensor | None]:
        given = (image if image.ndim > 1 else image[None]).clone()  # MONAI's dropout writes into what it is given
        changed = plain(applied(self.transforms(given.shape[1], image.ndim == 1), given, rng))
        return changed.reshape(image.shape), mask


@dataclass(frozen=True)
class Jitter(Values):
    """Adds Gaussian noise of mean 0 to every value (MONAI RandGaussianNoise).

    Args:
        std: the greatest standard deviation; a sample's is drawn between 0 and it.
        prob: how often.
    """

    std: float = 0.1
    prob: float = 0.5
    limits: ClassVar[Mapping[str, Range]] = {"std": (0, 10)}

    def transforms(self, length: int, row: bool) -> list[Any]:
        from monai.transforms import RandGaussianNoise

        return [RandGaussianNoise(1.0, 0.0, self.std)]


@dataclass(frozen=True)
class Hide(Values):
    """Puts the mean, 0, in the place of some features of a row, drawn one by one, or of a stretch of a window, in all
    its channels (MONAI RandCoarseDropout).

    Args:
        share: of the features (a feature may be drawn twice) or of the time steps; one at least.
        prob: how often.
    """

    share: float = 0.1
    prob: float = 0.5
    limits: ClassVar[Mapping[str, Range]] = {"share": (0, 1)}

    def transforms(self, length: int, row: bool) -> list[Any]:
        from monai.transforms import RandCoarseDropout

        count = max(1, round(self.share * length))
        holes, size = (count, 1) if row else (1, count)
        return [RandCoarseDropout(holes=holes, spatial_size=(size,), fill_value=0.0, prob=1.0)]
