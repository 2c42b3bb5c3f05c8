# SPDX-License-Identifier: Apache-2.0
"""What an augmentation is: a component with plain, checked numbers that builds one random transform of MONAI's."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError

Range = tuple[float, float]
"""The least and the greatest of what is drawn, every value between them as likely."""
IMAGE, MASK = "image", "mask"


class Augmentation(Checked):
    """A frozen dataclass whose fields are the job's arguments; it builds one random transform of MONAI's.

    A transform remembers what it drew last, so a new one is built for every sample: samples may be changed by several
    threads at a time.

    Raises:
        ConfigError: a field is outside its ``limits``, or a range's greatest value stands first.
    """

    prob: float
    """How often a sample is changed."""
    limits: ClassVar[Mapping[str, Range]]
    """Field to the least and greatest value that it may have, ``prob`` left out."""

    def __post_init__(self) -> None:
        for name, (least, most) in {**self.limits, "prob": (0.0, 1.0)}.items():
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(least <= number <= most for number in numbers):
                raise ConfigError(
                    f"{type(self).__name__}'s {name} must be between {least:g} and {most:g}, got {_shown(value)}"
                )
            if len(numbers) == 2 and numbers[0] > numbers[1]:
                raise ConfigError(
                    f"{type(self).__name__}'s {name} must be the least and the greatest value, got {_shown(value)}"
                )

    def check_axes(self, axes: int) -> None:
        """Refuse images (2 axes) or volumes (3) that the component cannot change, rows (0) and windows (1).

        Raises:
            ConfigError: it cannot.
        """

    def __call__(self, image: Tensor, mask: Tensor | None, rng: np.random.RandomState) -> tuple[Tensor, Tensor | None]:
        """One sample: changed, or as it is, as ``prob`` has it.

        Args:
            image: C x H x W [x D] float32, on the CPU; it is not changed in place.
            mask: H x W [x D] uint8, which moves with the image; None: the answer is no mask.
            rng: all that is drawn comes from it.

        Returns:
            Image and mask, of the shapes and types they had.
        """
        # MONAI's transforms have the same question; they take half a millisecond to do nothing.
        return self.change(image, mask, rng) if rng.random_sample() < self.prob else (image, mask)

    @abstractmethod
    def change(self, image: Tensor, mask: Tensor | None, rng: np.random.RandomState) -> tuple[Tensor, Tensor | None]:
        """As ``__call__``, always changed."""


class Intensity(Augmentation):
    """Changes the values of an image and leaves its mask alone."""

    @abstractmethod
    def transforms(self, axes: int) -> Sequence[Any]:
        """MONAI's, one after another, of a C x H x W [x D] image of 2 or 3 ``axes``."""

    def change(self, image: Tensor, mask: Tensor | None, rng: np.random.RandomState) -> tuple[Tensor, Tensor | None]:
        return plain(applied(self.transforms(image.ndim - 1), image, rng)), mask


class Spatial(Augmentation):
    """Moves an image and its mask alike; a voxel of the mask takes the value of the nearest one."""

    @abstractmethod
    def transforms(self, shape: tuple[int, ...], keys: tuple[str, ...]) -> Sequence[Any]:
        """MONAI's, one after another, of a dictionary with these keys: the image, and the mask as 1 x H x W [x D].

        Args:
            shape: H x W [x D], which the result has too.
        """

    def change(self, image: Tensor, mask: Tensor | None, rng: np.random.RandomState) -> tuple[Tensor, Tensor | None]:
        given = {IMAGE: image} if mask is None else {IMAGE: image, MASK: mask[None].float()}
        moved = applied(self.transforms(tuple(image.shape[1:]), tuple(given)), given, rng)
        return plain(moved[IMAGE]), None if mask is None else plain(moved[MASK])[0].to(torch.uint8)


def applied(transforms: Sequence[Any], given: Any, rng: np.random.RandomState) -> Any:
    """What MONAI's transforms make of a tensor or a dictionary, with all that they draw from ``rng``."""
    from monai.transforms import Randomizable

    for transform in transforms:
        given = (transform.set_random_state(state=rng) if isinstance(transform, Randomizable) else transform)(given)
    return given


def plain(image: Tensor) -> Tensor:
    """Without what MONAI notes of a tensor."""
    from monai.data import MetaTensor

    return image.as_tensor() if isinstance(image, MetaTensor) else image


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
