# SPDX-License-Identifier: Apache-2.0
"""Every augmentation on images and volumes: what it changes, what it leaves, and that masks go where images go."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medpfl.augment import intensity, spatial
from medpfl.augment.contract import Augmentation, Intensity, Spatial
from medpfl.augment.intensity import BiasField, Blur, Brightness, ColourJitter, Contrast, Gamma, LowResolution, Noise
from medpfl.augment.listed import augmented
from medpfl.augment.presets import PRESETS, preset
from medpfl.augment.spatial import Affine, Crop, Elastic2D, Elastic3D, Flip, Zoom
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.flare.allow import component_classes
from medpfl.tasks.segmentation import Segmentation

IMAGE, VOLUME = (40, 48), (28, 32, 26)


def kinds() -> Iterator[Any]:
    for module in (spatial, intensity):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Augmentation) and not inspect.isabstract(kind):
                yield kind


def test_a_stretch_divides_lengths() -> None:
    square = torch.zeros(1, 101, 101)
    square[:, 30:71, 30:71] = 1
    found = [Affine(0.0, stretch=0.2, prob=1.0)(square, None, np.random.RandomState(seed))[0] for seed in range(60)]
    lengths = [float(line.sum()) / 41 for image in found for line in (image[0, 50], image[0, :, 50])]
    assert 1 / 1.2 - 0.03 < min(lengths) < 0.86 and 1.21 < max(lengths) < 1 / 0.8 + 0.03


def fitting() -> list[Any]:
    """Each component with each shape that it takes."""
    found = []
    for kind in kinds():
        for shape in (IMAGE, VOLUME):
            try:
                kind().check_axes(len(shape))
            except ConfigError:
                continue
            found.append(pytest.param(kind(prob=1.0), shape, id=f"{kind.__name__}-{len(shape)}"))
    return found


def a_sample(shape: tuple[int, ...], channels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    mask = torch.randint(0, 3, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(channels, *shape, generator=generator), mask


@pytest.mark.parametrize(("component", "shape"), fitting())
def test_a_component_draws_from_what_it_is_given_alone_and_keeps_shapes_and_types(
    component: Augmentation, shape: tuple[int, ...]
) -> None:
    image, mask = a_sample(shape)
    before = image.clone(), mask.clone(), torch.get_rng_state(), np.random.get_state()[1].copy()
    changed, moved = component(image, mask, np.random.RandomState(5))
    again, same = component(image, mask, np.random.RandomState(5))
    other, _ = component(image, mask, np.random.RandomState(1))
    assert moved is not None and same is not None
    assert torch.equal(changed, again) and torch.equal(moved, same)
    assert isinstance(component, Flip) or not torch.equal(changed, other)
    assert type(changed) is Tensor and changed.dtype == torch.float32 and changed.shape == image.shape
    assert type(moved) is Tensor and moved.dtype == torch.uint8 and moved.shape == mask.shape
    assert changed.isfinite().all() and set(moved.unique().tolist()) <= {0, 1, 2}
    assert torch.equal(image, before[0]) and torch.equal(mask, before[1]) and not torch.equal(changed, image)
    assert torch.equal(torch.get_rng_state(), before[2]) and (np.random.get_state()[1] == before[3]).all()
    assert torch.equal(moved, mask) == isinstance(component, Intensity)
    alone, nothing = component(image, None, np.random.RandomState(5))
    assert nothing is None and torch.equal(alone, changed)


@pytest.mark.parametrize(("component", "shape"), fitting())
def test_a_component_is_written_and_read_as_json_and_may_be_never_drawn(
    component: Augmentation, shape: tuple[int, ...]
) -> None:
    assert build(spec_of(component), Augmentation, "here") == component
    assert spec_of(component)["path"] in component_classes()
    image, mask = a_sample(shape)
    assert type(component)(prob=0.0)(image, mask, np.random.RandomState(1)) == (image, mask)


def landmarks(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Three balls of radius 3.5, a channel for each; and the mask that numbers them."""
    places = torch.stack(torch.meshgrid(*(torch.arange(length) for length in shape), indexing="ij"))
    balls, mask = [], torch.zeros(shape, dtype=torch.uint8)
    for number, shares in enumerate(((0.32, 0.35, 0.4), (0.65, 0.36, 0.62), (0.46, 0.66, 0.45)), 1):
        middle = torch.tensor([length * share for length, share in zip(shape, shares, strict=False)])
        balls.append(((places - middle.view(-1, *[1] * len(shape))) ** 2).sum(dim=0) <= 3.5**2)
        assert not mask[balls[-1]].any()
        mask[balls[-1]] = number
    return torch.stack(balls).float(), mask


def centre(weights: Tensor) -> Tensor:
    along = [weights.sum(dim=[other for other in range(weights.ndim) if other != axis]) for axis in range(weights.ndim)]
    return torch.stack([(line * torch.arange(len(line))).sum() / line.sum() for line in along])


@pytest.mark.parametrize(("component", "shape"), [one for one in fitting() if isinstance(one.values[0], Spatial)])
def test_labels_go_where_landmarks_go(component: Augmentation, shape: tuple[int, ...]) -> None:
    """To a fraction of a voxel each time, and without a bias to one side."""
    image, mask = landmarks(shape)
    apart, moved_by = [], []
    for seed in range(10):
        moved, labels = component(image, mask, np.random.RandomState(seed))
        assert labels is not None
        for number, channel in enumerate(moved, 1):
            edge = channel.clone()
            edge[(slice(2, -2),) * len(shape)] = 0
            if edge.max() > 0.01 or channel.sum() < 20:  # it left the image, in part or as a whole
                continue
            apart.append(centre(channel) - centre((labels == number).float()))
            moved_by.append((centre(channel) - centre(image[number - 1])).norm())
    distances = torch.stack(apart)
    assert len(apart) >= 18 and torch.stack(moved_by).max() > 0.3
    assert distances.norm(dim=1).max() < 0.7
    assert distances.mean(dim=0).abs().max() < 0.12


@pytest.mark.parametrize("shape", [IMAGE, VOLUME])
def test_low_resolution_leaves_things_where_they_are(shape: tuple[int, ...]) -> None:
    """MONAI's own choice ("nearest") moves them by up to half a coarse pixel, always to the same side."""
    image, _ = landmarks(shape)
    blurred = Blur((1.5, 1.5), 1.0)(image, None, np.random.RandomState(0))[0]
    drift = []
    for seed in range(20):
        coarse, _ = LowResolution((0.4, 0.8), 1.0)(blurred, None, np.random.RandomState(seed))
        drift += [centre(one) - centre(other) for one, other in zip(coarse, blurred, strict=True)]
    assert torch.stack(drift).mean(dim=0).abs().max() < 0.15


@pytest.mark.parametrize("shape", [(1, 9), (3, 5), (16, 6, 1), (7, 8, 2)])
@pytest.mark.parametrize("outside", ["zeros", "border", "reflection"])
def test_thin_images_are_shrunk_as_far_as_they_can_be(shape: tuple[int, ...], outside: Any) -> None:
    image, mask = a_sample(shape)
    shrunk, moved = Zoom((0.5, 0.5), outside, 1.0)(image, mask, np.random.RandomState(1))
    assert moved is not None and shrunk.shape == image.shape and moved.shape == mask.shape and shrunk.isfinite().all()


def changed(component: Augmentation, image: Tensor, seed: int = 1) -> Tensor:
    return component(image, None, np.random.RandomState(seed))[0]


def test_what_the_numbers_of_spatial_components_mean() -> None:
    image, _ = a_sample(VOLUME)
    assert torch.equal(changed(Flip(1, 1.0), image), image.flip(2))
    turned = changed(Affine((0.0, 0.0, 90.0), prob=1.0), image)
    slices = torch.stack([turned[..., place].std() for place in range(VOLUME[2])])
    assert (slices > 0.3).all()
    flat = image * (torch.arange(VOLUME[2]) == 7)
    turned = changed(Affine((0.0, 0.0, 90.0), prob=1.0), flat)
    assert turned[..., 7].abs().sum() > 0 and turned[..., :7].abs().max() < 1e-4  # turned within its plane
    turned = changed(Affine((40.0, 0.0, 0.0), prob=1.0), flat)
    assert turned[..., :7].abs().max() > 0.01
    ball, _ = landmarks(IMAGE)
    areas = [float(changed(Zoom((factor, factor), prob=1.0), ball)[0].sum() / ball[0].sum()) for factor in (0.5, 2.0)]
    assert areas == pytest.approx([0.25, 4.0], rel=0.1)
    ramp = torch.arange(40.0).view(1, 40, 1).expand(1, 40, 40).clone()
    seen = [changed(Crop((0.5, 0.5)), ramp, seed) for seed in range(6)]
    assert all(float(one.max() - one.min()) == pytest.approx(19, abs=1) for one in seen)
    assert len({round(float(one.min())) for one in seen}) > 2
    white = torch.ones(1, *IMAGE)
    shifted = [changed(Affine(0.0, shift=0.3, outside=outside, prob=1.0), white) for outside in ("zeros", "border")]
    assert shifted[0].min() == 0 and torch.allclose(shifted[1], white)
    assert changed(Zoom((0.5, 0.5), prob=1.0), white)[0, 0, 0] == 0
    assert changed(Zoom((0.5, 0.5), "reflection", 1.0), white).min() == 1


def test_what_the_numbers_of_intensity_components_mean() -> None:
    image, _ = a_sample(IMAGE, channels=3)
    ratio = changed(Brightness((1.2, 1.5), prob=1.0), image) / image
    assert 1.2 <= ratio.min() <= ratio.max() <= 1.5 + 1e-5 and ratio.std() < 1e-5
    ratio = changed(Brightness((0.5, 1.5), True, 1.0), image) / image
    assert len({round(float(one.mean()), 4) for one in ratio}) == 3
    contrasted = changed(Contrast((0.5, 0.5), prob=1.0), image)
    assert contrasted.mean() == pytest.approx(float(image.mean()), abs=1e-5)
    assert contrasted.std() == pytest.approx(float(image.std()) / 2, rel=1e-4)
    assert changed(Contrast((3.0, 3.0), prob=1.0), image).max() == image.max()
    for invert in (False, True):
        darker = changed(Gamma((1.5, 1.5), invert, prob=1.0), image)
        assert darker.mean() == pytest.approx(float(image.mean()), abs=1e-4)
        assert darker.std() == pytest.approx(float(image.std()), rel=1e-3)
        free = changed(Gamma((1.5, 1.5), invert, False, 1.0), image)
        assert (free.mean() > image.mean()) == invert
    added = changed(Noise(0.5, 1.0), image) - image
    assert 0 < added.std() <= 0.5 and abs(added.mean()) < 0.05
    assert changed(Blur((2.0, 2.0), 1.0), image).std() < image.std() / 3
    lit = changed(BiasField((-0.3, 0.3), prob=1.0), torch.ones(1, *IMAGE))
    assert lit.min() < 0.97 * lit.max() and lit.diff(dim=1).abs().max() < 0.1
    colours = changed(ColourJitter((1.0, 1.0), (-0.5, 0.5), 1.0), torch.zeros(3, *IMAGE))
    assert len(set(colours[:, 0, 0].tolist())) == 3 and colours.abs().max() <= 0.5 and colours[0].std() == 0


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("shape", [IMAGE, VOLUME])
def test_a_preset_changes_a_batch_alike_on_any_number_of_threads(name: str, shape: tuple[int, ...]) -> None:
    image, mask = a_sample(shape, channels=3)
    inputs, masks = image.expand(5, *image.shape), mask.expand(5, *mask.shape)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(augmented(name, inputs, masks, torch.Generator().manual_seed(2)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    (one, labels), (other, same) = found
    assert labels is not None and same is not None
    assert torch.equal(one, other) and torch.equal(labels, same)
    assert len({sample.numpy().tobytes() for sample in one}) == 5 and not torch.equal(labels, masks)


@pytest.mark.parametrize("shape", [(320, 320), (80, 160, 40), (64, 64, 32), (64, 64, 16), (12, 64, 64)])
def test_the_angles_of_the_nnunet_preset_follow_the_patch(shape: tuple[int, ...]) -> None:
    """nnU-Net: 180 degrees in a square image, 15 in a long one; 30 about every axis; in the plane of thick slices."""
    first = preset("nnunet", shape)[0]
    assert isinstance(first, Affine)
    expected: dict[tuple[int, ...], object] = {
        (320, 320): 180.0, (80, 160, 40): (0.0, 0.0, 180.0), (64, 64, 32): 30.0, (64, 64, 16): (0.0, 0.0, 180.0),
        (12, 64, 64): (180.0, 0.0, 0.0),
    }  # fmt: skip
    assert first.degrees == expected[shape]


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (Flip, {"axis": 3}, "Flip's axis must be between 0 and 2, got 3"),
        (Flip, {"prob": 1.5}, "Flip's prob must be between 0 and 1, got 1.5"),
        (Noise, {"std": 10.5}, "Noise's std must be between 0 and 10, got 10.5"),
        (Zoom, {"factor": [1.2, 0.8]}, r"Zoom's factor must be the least and the greatest value, got \[1.2, 0.8\]"),
        (Zoom, {"factor": [0, 2]}, r"Zoom's factor must be between 0.5 and 10, got \[0.0, 2.0\]"),
        (Affine, {"degrees": [10, 10, 200]}, "Affine's degrees must be between 0 and 180"),
        (Affine, {"outside": "mirror"}, "must be 'zeros', 'border' or 'reflection', got 'mirror'"),
        (Gamma, {"gamma": "high"}, "argument 'gamma' of Gamma must be a list of 2 numbers, got 'high'"),
        (BiasField, {"degree": 2.5}, "argument 'degree' of BiasField must be a whole number"),
    ],
)
def test_numbers_outside_their_limits_are_refused(kind: Any, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build({"path": f"{kind.__module__}.{kind.__name__}", "args": arguments}, Augmentation, "here")


@pytest.mark.parametrize(
    ("component", "words"),
    [
        (Flip(2), "Flip's axis must be between 0 and 1 for images of 2 axes, got 2"),
        (Affine((5.0, 5.0, 5.0)), "Affine's degrees must be one number for images"),
        (Elastic3D(), "Elastic3D bends volumes; images are bent by Elastic2D"),
    ],
)
def test_a_component_that_does_not_fit_the_images_is_refused_before_any_is_read(
    component: Augmentation, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Segmentation("organ", augment=(component,))
    with pytest.raises(ConfigError, match="Elastic2D bends images; volumes are bent by Elastic3D"):
        Elastic2D().check_axes(3)
