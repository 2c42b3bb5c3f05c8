# SPDX-License-Identifier: Apache-2.0
"""What an augmentation is, and how a batch is augmented: the same seed gives the same batch on every machine."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from medpfl.component import build
from medpfl.core.checked import Checked

Listed = Mapping[str, JsonValue]
"""A component in a job's list, {"path": class, "args": {...}}: FLARE builds components in mappings, not in lists."""


class Augmentation(Checked):
    """A frozen dataclass whose fields are the job's arguments; it builds one random transform of MONAI's."""

    @abstractmethod
    def __call__(self, image: Tensor, mask: Tensor | None, rng: np.random.RandomState) -> tuple[Tensor, Tensor | None]:
        """One sample, changed at random.

        Args:
            image: C x H x W [x D] float32, on the CPU; it is not changed in place.
            mask: H x W [x D] uint8, which moves with the image; None: the answer is no mask.
            rng: all that is drawn comes from it.

        Returns:
            Image and mask, of the shapes and types they had.
        """


def built(listed: Sequence[Augmentation | Listed], where: str) -> tuple[Augmentation, ...]:
    """A job's list as components.

    Raises:
        ConfigError: an entry is no augmentation, or its arguments are wrong.
    """
    return tuple(one if isinstance(one, Augmentation) else build(one, Augmentation, where) for one in listed)


def augmented(
    listed: Sequence[Augmentation | Listed], inputs: Tensor, masks: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """A batch after all augmentations in their order, each sample with random numbers of its own.

    Args:
        inputs: B x C x H x W [x D]; ``masks``: B x H x W [x D], or None.
    """
    if not listed:
        return inputs, masks
    augmentations = built(listed, "augment")
    seeds = torch.randint(2**32, (len(inputs),), generator=generator).tolist()
    images, labels = list(inputs), None if masks is None else list(masks)
    for place, seed in enumerate(seeds):
        rng = np.random.RandomState(seed)
        image, mask = images[place], None if labels is None else labels[place]
        for augmentation in augmentations:
            image, mask = augmentation(image, mask, rng)
        images[place] = image
        if labels is not None and mask is not None:
            labels[place] = mask
    return torch.stack(images), None if labels is None else torch.stack(labels)
