# SPDX-License-Identifier: Apache-2.0
"""Lists of augmentations by name, for a job that does not want to write its own."""

import difflib
from collections.abc import Callable, Sequence

from medpfl.augment.contract import Augmentation
from medpfl.augment.intensity import (
    BiasField,
    Blur,
    Brightness,
    ColourJitter,
    Contrast,
    Gamma,
    LowResolution,
    Noise,
    Shift,
)
from medpfl.augment.spatial import Affine, Crop, Elastic2D, Elastic3D, Flip, Zoom
from medpfl.core.errors import ConfigError

Lengths = Sequence[int]
_THIN = 3
"""nnU-Net's ANISO_THRESHOLD: a patch so many times as long as it is thick is turned in its plane only."""


def light(size: Lengths) -> list[Augmentation]:
    """Little of everything that nearly any image stands: no flips, for most organs have a side."""
    return [
        Affine(10.0, shift=0.05, outside="border", prob=0.5),
        Zoom((0.9, 1.1), "border", 0.5),
        Brightness((0.9, 1.1), prob=0.3),
        Contrast((0.9, 1.1), prob=0.3),
        Noise(0.05, 0.2),
    ]


def nnunet(size: Lengths) -> list[Augmentation]:
    """nnU-Net's (Isensee et al., Nature Methods 2021): the numbers of ``get_training_transforms`` in nnunetv2's
    nnUNetTrainer.py, in its order.

    It differs where MONAI does: blur and low resolution change all channels of an image, with the probability that
    nnU-Net has for one (0.5 of 0.2 and of 0.25); to blur, what lies beyond the edge is 0, not mirrored; a gamma is one
    for all channels, which are scaled together, and is drawn evenly from its range, not as often below 1 as above; of
    thick slices, zoom takes the third axis along. Noise has a standard deviation of up to 0.32, about three times
    theirs: what nnU-Net calls a variance of up to 0.1, its code takes for the standard deviation.
    """
    return [*nnunet_no_mirroring(size), *_flips(range(len(size)))]


def nnunet_no_mirroring(size: Lengths) -> list[Augmentation]:
    """As nnU-Net's nnUNetTrainerNoMirroring: where classes have a side, and for small networks."""
    return [
        Affine(_turns(size), prob=0.2),
        Zoom((1 / 1.4, 1 / 0.7), prob=0.2),
        Noise(0.1**0.5, 0.1),  # 0.1 is a variance by its name, and was taken for one
        Blur((0.5, 1.0), 0.1),
        Brightness((0.75, 1.25), True, 0.15),
        Contrast((0.75, 1.25), True, 0.15),
        LowResolution((0.5, 1.0), 0.125),
        Gamma((0.7, 1.5), True, prob=0.1),
        Gamma((0.7, 1.5), False, prob=0.3),
    ]


def dermoscopy(size: Lengths) -> list[Augmentation]:
    """Photographs of skin, which have no up or down: the basic set that served best in Perez et al., "Data Augmentation
    for Skin Lesion Analysis" (ISIC workshop at MICCAI 2018), with the numbers of the authors' code
    (github.com/fabioperez/skin-data-augmentation, ``full-basic`` of run-aug-scenarios.sh).

    Theirs: crops of 0.4 to 1 of the area, turns to 90 degrees, shear to 20 degrees, scale 0.8 to 1.2, both flips,
    brightness, contrast and saturation 0.7 to 1.3, hue 0.1; all of them always. It differs where MONAI does: lengths
    are divided by 0.8 to 1.2, so that they become 0.83 to 1.25 times as long; shear acts along both axes; a shift of
    0.6 stands for brightness, which it is at the middle of the range; channels that are multiplied and shifted by
    themselves stand for saturation and hue.
    """
    return [
        Crop((0.4**0.5, 1.0)),
        Affine(90.0, stretch=0.2, shear=0.364, outside="reflection", prob=1.0),
        *_flips(range(len(size))),
        Shift((-0.6, 0.6), prob=1.0),
        Contrast((0.7, 1.3), prob=1.0),
        ColourJitter((0.9, 1.1), (-0.1, 0.1), 1.0),
    ]


def fundus(size: Lengths) -> list[Augmentation]:
    """Photographs of the retina: left and right eyes mirror each other, cameras differ in colour, light and focus."""
    return [
        Flip(1),
        Affine(25.0, stretch=0.1, shift=0.05, prob=0.5),
        ColourJitter((0.8, 1.2), (-0.2, 0.2), 0.5),
        Contrast((0.75, 1.25), prob=0.3),
        Gamma((0.7, 1.5), prob=0.3),
        Blur((0.3, 1.5), 0.2),
        Noise(0.1, 0.1),
    ]


def mri(size: Lengths) -> list[Augmentation]:
    """nnU-Net's changes of intensity, as in ``nnunet``, a bias field and gentler moves, mirrored right-left only."""
    bent = Elastic2D(prob=0.15) if len(size) == 2 else Elastic3D(prob=0.15)
    return [
        Affine(15.0, stretch=0.1, prob=0.3),
        Zoom((0.85, 1.15), prob=0.2),
        bent,
        BiasField((-0.15, 0.15), prob=0.3),
        Noise(0.1**0.5, 0.1),
        Blur((0.5, 1.0), 0.1),
        Brightness((0.75, 1.25), True, 0.15),
        Contrast((0.75, 1.25), True, 0.15),
        LowResolution((0.5, 1.0), 0.125),
        Gamma((0.7, 1.5), True, prob=0.1),
        Gamma((0.7, 1.5), False, prob=0.3),
        Flip(0),
    ]


PRESETS: dict[str, Callable[[Lengths], list[Augmentation]]] = {
    one.__name__: one for one in (light, nnunet, nnunet_no_mirroring, dermoscopy, fundus, mri)
}


def preset(name: str, size: Lengths) -> tuple[Augmentation, ...]:
    """The augmentations that a preset's name stands for.

    Args:
        size: lengths of the images or volumes that they are for: angles follow from it.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        meant = difflib.get_close_matches(name, PRESETS, 1)
        raise ConfigError(
            f"there is no preset of augmentations '{name}'{f'; did you mean {meant[0]!r}?' if meant else ''}; "
            f"there are: {', '.join(PRESETS)}"
        )
    return tuple(PRESETS[name](size))


def _turns(size: Lengths) -> float | tuple[float, float, float]:
    """The angles of nnU-Net's configure_rotation_dummyDA_mirroring_and_inital_patch_size."""
    if len(size) == 2:
        return 15.0 if max(size) / min(size) > 1.5 else 180.0
    if max(size) / min(size) <= _THIN:
        return 30.0
    thin = size.index(min(size))
    return (180.0 * (thin == 0), 180.0 * (thin == 1), 180.0 * (thin == 2))


def _flips(axes: Sequence[int]) -> list[Augmentation]:
    return [Flip(axis) for axis in axes]
