# SPDX-License-Identifier: Apache-2.0
"""Augmentation as a job lists it: built of plain values, drawn from the step's generator."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from medpfl.augment.contract import Augmentation
from medpfl.augment.listed import augmented
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples
from medpfl.tasks.classification import Classification
from medpfl.tasks.contract import Task
from medpfl.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class Rolled(Augmentation):
    """Moves image and mask along an axis, by a random number of places."""

    axis: int = -1
    prob: float = 1.0
    limits: ClassVar = {}

    def change(self, image: Tensor, mask: Tensor | None, rng: np.random.RandomState) -> tuple[Tensor, Tensor | None]:
        by = int(rng.randint(1, 8))
        return image.roll(by, self.axis), None if mask is None else mask.roll(by, self.axis)


PATH = f"{Rolled.__module__}.Rolled"
LISTED = [{"path": PATH, "args": {"axis": -2}}, {"path": PATH, "args": {}}]


def a_batch() -> tuple[Tensor, Tensor]:
    mask = torch.randint(0, 2, (6, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return mask[:, None].float(), mask


def test_labels_move_with_images_each_sample_by_its_own_numbers() -> None:
    inputs, masks = a_batch()
    one, mask = augmented([Rolled(-2), Rolled()], inputs, masks, torch.Generator().manual_seed(3))
    again, _ = augmented(LISTED, inputs, masks, torch.Generator().manual_seed(3))
    other, _ = augmented(LISTED, inputs, masks, torch.Generator().manual_seed(4))
    assert mask is not None and torch.equal(one[:, 0], mask.float())
    assert torch.equal(one, again) and not torch.equal(one, other)
    same, _ = augmented(LISTED, inputs[:1].expand(6, -1, -1, -1), None, torch.Generator().manual_seed(3))
    assert len({row.numpy().tobytes() for row in same}) > 1
    assert torch.equal(inputs, a_batch()[0])


@pytest.mark.parametrize("kind", [Segmentation, Classification])
def test_a_job_lists_augmentations_by_class_and_arguments(kind: Any) -> None:
    task: Any = build(
        {"path": f"{kind.__module__}.{kind.__name__}", "args": {"dataset": "a", "augment": LISTED}}, Task, "task"
    )
    assert task == build(spec_of(task), Task, "task") and task != kind("a")
    args: Any = spec_of(task)["args"]
    assert args["augment"] == [{"path": PATH, "args": {"axis": axis, "prob": 1.0}} for axis in (-2, -1)]
    inputs, masks = a_batch()
    targets = masks if kind is Segmentation else torch.arange(6)
    samples = Samples(inputs, targets, np.arange(6), [str(number) for number in range(6)])
    chosen = torch.tensor([4, 1])
    seen, aims = task.present(samples, chosen, torch.Generator().manual_seed(2))
    plain, unchanged = kind("a").present(samples, chosen, torch.Generator().manual_seed(2))
    assert not torch.equal(seen, plain) and torch.equal(plain, inputs[chosen])
    assert torch.equal(aims, seen[:, 0].to(torch.uint8) if kind is Segmentation else unchanged)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"path": "medpfl.models.unet.UNet"}], "is no Augmentation"),
        ([{"path": PATH, "args": {"axes": 1}}], "unknown argument 'axes' of Rolled; it has: axis, prob; .*'axis'?"),
        ([{"path": "os.system", "args": {}}], "'os.system'"),
        ([{"args": {}}], "expected {'path'"),
        ([{"path": "medpfl.augment.spatial.Flipp"}], r"did you mean 'Flip'\?"),
        ([{"path": "medpfl.augment.Flip"}], "it is called 'medpfl.augment.spatial.Flip' now"),
        ([{"path": "medpfl.augment.intensity.Flip"}], "it is called 'medpfl.augment.spatial.Flip' now"),
        ([{"path": "medpfl.augment.intensity.Noise", "args": {"standard": 1}}], "unknown argument 'standard' of Noise"),
        (
            "nn-unet",
            r"no preset of augmentations 'nn-unet'; did you mean 'nnunet'\?; there are: light, nnunet, nnunet_no",
        ),
        (3, "argument 'augment' of Segmentation must be a list of .* or a string, got 3"),
    ],
)
def test_what_is_no_augmentation_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Segmentation("organ", augment=given)


def test_a_job_names_a_preset_and_the_model_keeps_its_components() -> None:
    task = Segmentation("organ", augment="nnunet")
    args: Any = spec_of(task)["args"]
    assert [one["path"].rpartition(".")[2] for one in args["augment"]][:3] == ["Affine", "Zoom", "Noise"]
    assert build(spec_of(task), Task, "task") == task
    assert spec_of(Segmentation("organ"))["args"]["augment"] == []  # type: ignore[index]
