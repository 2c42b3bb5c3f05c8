# SPDX-License-Identifier: Apache-2.0
"""Patches of volumes and images for training, and whole ones from patches: both as nnU-Net does.

Isensee et al., "nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation", Nature
Methods 2021: a third of every batch holds foreground; windows overlap by half and are weighted by a Gaussian.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples

FOREGROUND = 1 / 3
"""Share of a batch whose patches hold foreground."""
OVERLAP = 0.5
_WINDOWS = 4  # that a network sees at a time


def draw_patches(samples: Samples, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One patch of each chosen case, of the size of the cases' views.

    The last third of the batch (rounded; of a single case one in three) is centred on a voxel of a random class above
    0, as far as the volume's edges allow; where a case has none, and for the others, every place in the volume is
    equally likely. Along an axis that is shorter than the patch the volume lies in its middle, between zeros.

    Args:
        chosen: B numbers of cases.

    Returns:
        Inputs, B x C x size, and label maps, B x size.
    """
    inputs, masks = samples.inputs, samples.targets
    assert isinstance(inputs, CaseRows) and isinstance(masks, CaseRows)
    plain = round(len(chosen) * (1 - FOREGROUND))
    if len(chosen) == 1:
        plain = int(float(torch.rand((), generator=generator)) >= FOREGROUND)
    starts = [
        (_around(masks, number, generator) if place >= plain else None) or _anywhere(masks, number, generator)
        for place, number in enumerate(chosen.tolist())
    ]
    numbered = list(zip(chosen.tolist(), starts, strict=True))
    return (
        torch.stack([inputs.patch(number, start) for number, start in numbered]),
        torch.stack([masks.patch(number, start) for number, start in numbered]),
    )


def _anywhere(masks: CaseRows, number: int, generator: torch.Generator) -> list[int]:
    centre, lengths = masks.centre(number), masks.spatial(number)
    return [
        _draw(length - side + 1, generator) if length > side else middle
        for length, side, middle in zip(lengths, masks.size, centre, strict=True)
    ]


def _around(masks: CaseRows, number: int, generator: torch.Generator) -> list[int] | None:
    """A patch around a voxel of a random class of the case's; None where it has none above 0."""
    places = masks.places(number)
    if not places:
        return None
    of_class = places[list(places)[_draw(len(places), generator)]]
    voxel = of_class[_draw(len(of_class), generator)].tolist()
    centre, lengths = masks.centre(number), masks.spatial(number)
    return [
        min(max(at - side // 2, 0), length - side) if length > side else middle
        for at, length, side, middle in zip(voxel, lengths, masks.size, centre, strict=True)
    ]


def _draw(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def slide(forward: Callable[[Tensor], Tensor], inputs: Tensor, size: tuple[int, ...]) -> Tensor:
    """A network's outputs for whole volumes, B x C x H x W x D (or images, B x C x H x W), from windows of the ``size``
    that it was trained on. One that is smaller lies between zeros, as in training."""
    from monai.inferers import sliding_window_inference

    found: Any = sliding_window_inference(inputs, size, _WINDOWS, forward, overlap=OVERLAP, mode="gaussian")
    outputs: Tensor = found
    return outputs
