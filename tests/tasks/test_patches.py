# SPDX-License-Identifier: Apache-2.0
"""3-D segmentation: patches drawn for training, whole volumes predicted from windows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bundled import as_in_bundles
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.data.declared import StorageRule
from medpfl.data.intensity import Intensity, Percentiles, Window, ZScore
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Budget, CaseStore, Samples, SiteData
from medpfl.models.dynunet import DynUNet
from medpfl.models.unet import UNet
from medpfl.tasks.contract import Task
from medpfl.tasks.inference import decide_samples
from medpfl.tasks.patches import draw_patches
from medpfl.tasks.segmentation import Segmentation

SIZE = (8, 8, 4)
TASK = Segmentation("organ", size=SIZE, architecture=UNet((2, 4)))


def rows(each: list[Tensor]) -> CaseRows:
    store = CaseStore(Budget(StorageRule(), Path()), SIZE)
    for case in each:
        store.append(case)
    return store.finish()


def volumes(*shapes: tuple[int, int, int], organ: bool = True) -> Samples:
    """Every voxel of a volume's two channels says where it is; the organ, 1, is one voxel, and 2 is another."""
    images, masks = [], []
    for number, shape in enumerate(shapes):
        place = torch.arange(1, math.prod(shape) + 1).view(shape).float()
        images.append(torch.stack([place + 10_000 * number, place]))
        mask = torch.zeros(shape, dtype=torch.uint8)
        if organ:
            mask[0, 0, 0], mask[-1, -1, -1] = 1, 2
        masks.append(mask)
    names = [f"case{number}" for number in range(len(shapes))]
    return Samples(rows(images), rows(masks), np.arange(len(shapes)), names, 3)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_same_seed_draws_the_same_patches_and_labels_move_with_images() -> None:
    samples, chosen = volumes((20, 16, 12), (9, 8, 4), (30, 30, 1)), torch.tensor([2, 0, 1, 0])
    inputs, masks = draw_patches(samples, chosen, seeded(1))
    again, _ = draw_patches(samples, chosen, seeded(1))
    other, _ = draw_patches(samples, chosen, seeded(2))
    assert inputs.shape == (4, 2, *SIZE) and masks.shape == (4, *SIZE) and masks.dtype == torch.uint8
    assert torch.equal(inputs, again) and not torch.equal(inputs, other)
    for number, image, mask in zip(chosen.tolist(), inputs, masks, strict=True):
        true: Any = samples.targets
        for voxel in mask.nonzero().tolist():
            where = int(image[1][tuple(voxel)]) - 1
            assert true.whole(number).flatten()[where] == mask[tuple(voxel)]
        assert not mask[image[1] == 0].any()


@pytest.mark.parametrize(("batch", "least"), [(2, 1), (3, 1), (6, 2), (9, 3)])
def test_a_third_of_every_batch_holds_foreground(batch: int, least: int) -> None:
    samples = volumes(*[(40, 40, 40)] * batch)
    seen: set[int] = set()
    for seed in range(30):
        _, masks = draw_patches(samples, torch.arange(batch), seeded(seed))
        assert all(mask.any() for mask in masks[batch - least :])
        seen |= set(masks.unique().tolist())
    assert seen == {0, 1, 2}  # every class is looked for


def test_of_single_cases_a_third_hold_foreground() -> None:
    samples = volumes((60, 60, 60))
    count = sum(bool(draw_patches(samples, torch.tensor([0]), seeded(seed))[1].any()) for seed in range(150))
    assert 35 <= count <= 65


def test_without_foreground_a_patch_lies_anywhere() -> None:
    samples = volumes((40, 40, 40), organ=False)
    firsts = {int(draw_patches(samples, torch.tensor([0] * 3), seeded(seed))[0][2, 1, 0, 0, 0]) for seed in range(9)}
    assert len(firsts) == 9


def test_a_patch_larger_than_the_volume_is_padded_around_it_and_a_slice_is_a_volume() -> None:
    samples = volumes((5, 8, 1))
    inputs, masks = draw_patches(samples, torch.tensor([0, 0, 0]), seeded(1))
    whole: Any = samples.inputs
    for patch, mask in zip(inputs, masks, strict=True):
        assert torch.equal(patch[:, 2:7, :, 2:3], whole.whole(0)) and int((patch[1] > 0).sum()) == 40
        assert mask[2, 0, 2] == 1 and mask[6, 7, 2] == 2 and int((mask > 0).sum()) == 2
    assert torch.equal(inputs[0], samples.inputs[:][0])  # the view of a small volume holds all of it


class Near(nn.Module):
    """Two scores a voxel, from its surroundings: what lies beyond a window matters at its edge."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 2, 5, padding=2)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        return scores


@pytest.mark.parametrize("shape", [(20, 9, 7), (5, 8, 1), SIZE])
def test_whole_volumes_are_predicted_as_monais_sliding_window_does(shape: tuple[int, int, int]) -> None:
    from monai.inferers import SlidingWindowInferer

    torch.manual_seed(0)
    network, image = Near().eval(), torch.randn(1, 1, *shape)
    with torch.inference_mode():
        found = TASK.infer(network, image)
        expected = SlidingWindowInferer(SIZE, sw_batch_size=4, overlap=0.5, mode="gaussian")(image, network)
    assert found.shape == (1, 2, *shape) and torch.equal(found, expected)
    samples = Samples(rows([image[0]]), rows([torch.zeros(shape, dtype=torch.uint8)]), np.arange(1), ["one"])
    decided = decide_samples(TASK, network, samples, torch.device("cpu"))
    assert torch.equal(decided, expected.argmax(dim=1).flatten().to(torch.uint8))


def test_cases_are_scored_whole_and_one_by_one() -> None:
    samples = volumes((9, 8, 4), (20, 20, 20), (5, 5, 1))
    truth: Any = samples.targets
    masks = [truth.whole(number) for number in range(3)]
    masks[1][0, 0, 0] = 0  # of two classes one is missed
    found = TASK.evaluate(torch.cat([mask.flatten() for mask in masks]), samples)
    assert [case["dice"] for case in found.cases] == [1.0, 0.5, 1.0]
    assert [case["case"] for case in found.cases] == samples.names
    some = decide_samples(TASK, lambda given: given, samples, torch.device("cpu"), torch.tensor([0, 2]))
    assert len(some) == 9 * 8 * 4 + 5 * 5


def test_a_patchs_lengths_are_multiples_axis_by_axis() -> None:
    network = DynUNet(filters=(2, 4, 4), strides=((2, 2, 1), (2, 2, 2)))
    assert Segmentation("organ", size=(8, 12, 6), architecture=network).size == (8, 12, 6)
    with pytest.raises(ConfigError, match="multiples of 4, 4, 2 for DynUNet"):
        Segmentation("organ", size=(8, 6, 4), architecture=network)


def test_a_network_trains_on_patches_and_is_built_for_them() -> None:
    samples = volumes((20, 16, 12), (9, 8, 4))
    data = SiteData({"train": samples, "validation": samples, "test": samples}, ["background", "one", "two"])
    assert data.input_shape == (2, *SIZE)
    torch.manual_seed(0)
    network = TASK.network(data)
    inputs, masks = TASK.present(samples, torch.tensor([1, 0]), seeded(3))
    loss = TASK.loss(network((inputs - 5000) / 5000), masks)
    assert network(inputs).shape == (2, 3, *SIZE) and bool(torch.isfinite(loss))


def test_a_channel_with_equal_percentiles_is_cut_at_0_and_1() -> None:
    """Hardly anything of it is not background: MONAI would leave its values as they are, in the thousands."""
    image = torch.arange(2000.0).repeat(2, 1).view(2, 20, 10, 10)
    image[1] = 0
    image[1, 3, 3, :5] = 3000
    found = Percentiles()(image.clone())
    assert torch.equal(found[1], (image[1] > 0).float()) and found[0].min() == 0 and found[0].max() == 1
    assert torch.equal(as_in_bundles(Percentiles(), image), found)
    assert bool(Percentiles(low=0, high=100)(image)[1].any())


@pytest.mark.parametrize(
    ("intensity", "expected"),
    [
        (Window(low=0, high=100), [0.0, 0.0, 0.5, 1.0, 1.0]),
        (Percentiles(low=0, high=100), [0.0, 0.2, 0.4, 0.6, 1.0]),
        (Percentiles(low=25, high=75), [0.0, 0.0, 0.5, 1.0, 1.0]),
        (ZScore(), [-1.27872, -0.69749, -0.11625, 0.46499, 1.62747]),
    ],
)
def test_intensities(intensity: Intensity, expected: list[float]) -> None:
    values = torch.tensor([-50.0, 0.0, 50.0, 100.0, 200.0])
    constant = torch.full((5,), 7.0)
    image = torch.stack([values, constant]).view(2, 5, 1, 1)
    found = intensity(image.clone())
    torch.testing.assert_close(found[0].flatten(), torch.tensor(expected), atol=1e-4, rtol=0)
    assert found[1].unique().tolist() == [pytest.approx(0.07 if isinstance(intensity, Window) else 0)]
    torch.testing.assert_close(as_in_bundles(intensity, image)[0], found[0])
    task = Segmentation("organ", size=SIZE, architecture=UNet((2, 4)), intensity=intensity)
    assert build(spec_of(task), Task, "task") == task and task.spec.intensity == intensity


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": [40, 56, 41]}, "multiples of 8"),
        ({"size": [40, 56, 40, 8]}, "or 3 for patches of volumes"),
        ({"size": [16, 16, 8], "spacing": [0, 1, 1]}, "spacing must be 3 positive numbers"),
        ({"intensity": {"path": "medpfl.data.intensity.Window", "args": {"low": 5, "high": 5}}}, "below its high"),
        ({"intensity": {"path": "medpfl.data.intensity.Percentiles", "args": {"high": 101}}}, "0 <= low < high <= 100"),
        ({"intensity": {"path": "medpfl.models.unet.UNet"}}, "is no Intensity"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build({"path": "medpfl.tasks.Segmentation", "args": {"dataset": "organ", **arguments}}, Task, "task")
