# SPDX-License-Identifier: Apache-2.0
"""Augmentations as a job lists them, and how they change a batch: the same seed gives the same batch everywhere."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from medpfl.augment.contract import Augmentation
from medpfl.augment.presets import preset
from medpfl.augment.values import Values
from medpfl.component import build
from medpfl.core.errors import ConfigError
from medpfl.data.geometry import geometry

Listed = Mapping[str, JsonValue]
"""A component in a job's list, {"path": class, "args": {...}}: FLARE builds components in mappings, not in lists."""
Given = tuple[Augmentation | Listed, ...] | str
"""What a job may say: a list of components, or the name of a preset."""


def built(given: Sequence[Augmentation | Listed] | str, where: str, size: Sequence[int]) -> tuple[Augmentation, ...]:
    """A job's list, or the preset that it names, as components.

    Args:
        size: lengths of the images or volumes that they are for; of windows one, of rows none.

    Raises:
        ConfigError: there is no such preset, an entry is no augmentation, its arguments are wrong, or it does not fit
            images of so many axes.
    """
    if isinstance(given, str):
        if len(size) < 2:
            raise ConfigError(
                f"{where}: presets such as '{given}' are for images; list components of medpfl.augment.values"
            )
        return preset(given, size)
    found = tuple(one if isinstance(one, Augmentation) else build(one, Augmentation, where) for one in given)
    for one in found:
        if len(size) < 2 and not isinstance(one, Values):
            raise ConfigError(f"{where}: {type(one).__name__} changes images; take components of medpfl.augment.values")
        one.check_axes(len(size))
    return found


def augmented(
    given: Sequence[Augmentation | Listed] | str, inputs: Tensor, masks: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """A batch after all augmentations in their order, each sample with random numbers of its own.

    What is drawn depends on ``generator`` alone, and the result not even by rounding on how many threads torch has.

    Args:
        inputs: B x C x H x W [x D], B x C x length or B x F; ``masks``: B x H x W [x D], or None.
    """
    if not given:
        return inputs, masks
    augmentations = built(given, "augment", inputs.shape[2:])
    seeds = torch.randint(2**32, (len(inputs),), generator=generator).tolist()
    images, labels = list(inputs), None if masks is None else list(masks)
    with _one_thread(), geometry(False):
        for place, seed in enumerate(seeds):
            rng = np.random.RandomState(seed)
            image, mask = images[place], None if labels is None else labels[place]
            for augmentation in augmentations:
                image, mask = augmentation(image, mask, rng)
            images[place] = image
            if labels is not None and mask is not None:
                labels[place] = mask
    return torch.stack(images), None if labels is None else torch.stack(labels)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch splits sums between its threads, so that a mean's last bit depends on their number; and for images of this
    size the threads take longer to start than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
