# SPDX-License-Identifier: Apache-2.0
"""Losses: worked out by hand, equal to torch's and scikit-learn's, what they refuse, and that counts stay at home."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.data.target import Target
from medpfl.flare.allow import component_classes
from medpfl.job import Job
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks import Classification, Segmentation, Tabular, TimeSeries
from medpfl.tasks.losses import CrossEntropy, DiceCE, DiceFocal, Focal, Loss, Tversky
from medpfl.tasks.losses.regions import RegionDiceCE
from small_jobs import write_table_sites
from tools import run

EVERY: list[Loss] = [CrossEntropy(), CrossEntropy((1.0, 3.0)), Focal(), DiceCE(), DiceFocal(), Tversky()]
LOGITS = torch.tensor([[2.0], [-1.0], [0.5]])
CLASSES = torch.tensor([1, 0, 0])


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


RIGHT = [sigmoid(2), 1 - sigmoid(-1), 1 - sigmoid(0.5)]
"""Probability of each one's own class."""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (CrossEntropy(), -sum(math.log(p) for p in RIGHT) / 3),
        (CrossEntropy((0.5, 2.0)), -(2 * math.log(RIGHT[0]) + 0.5 * math.log(RIGHT[1] * RIGHT[2])) / 3),
        (Focal(gamma=2), -sum((1 - p) ** 2 * math.log(p) for p in RIGHT) / 3),
        (Focal(gamma=0), -sum(math.log(p) for p in RIGHT) / 3),
    ],
)
def test_losses_of_classes_by_hand(loss: Loss, expected: float) -> None:
    """In the logistic form and with one output a class."""
    assert float(loss(LOGITS, CLASSES)) == pytest.approx(expected)
    assert float(loss(torch.cat([torch.zeros(3, 1), LOGITS], dim=1), CLASSES)) == pytest.approx(expected)


def two_pixels() -> tuple[Tensor, Tensor, float, float]:
    """Outputs, targets, and the probability of class 1 in each of two pixels, of which the first has it."""
    outputs = torch.tensor([[[[0.0, 2.0]], [[1.0, -1.0]]]])
    return outputs, torch.tensor([[[1, 0]]], dtype=torch.uint8), sigmoid(1), sigmoid(-3)


def test_losses_of_masks_by_hand() -> None:
    outputs, targets, first, second = two_pixels()
    dice = 1 - 2 * first / (first + second + 1)
    assert float(DiceCE()(outputs, targets)) == pytest.approx(
        dice - (math.log(first) + math.log(1 - second)) / 2, abs=1e-4
    )
    focal = -((1 - first) ** 2 * math.log(first) + second**2 * math.log(1 - second)) / 2
    assert float(DiceFocal()(outputs, targets)) == pytest.approx(dice + focal, abs=1e-4)
    assert float(DiceFocal(gamma=0)(outputs, targets)) == pytest.approx(float(DiceCE()(outputs, targets)))
    hit, wrong, missed = first, second, 1 - first
    tversky = 1 - hit / (hit + 0.3 * wrong + 0.7 * missed)
    assert float(Tversky()(outputs, targets)) == pytest.approx(tversky, abs=1e-4)
    assert float(Tversky(0.5, 0.5)(outputs, targets)) == pytest.approx(dice, abs=1e-4)


@pytest.mark.parametrize("loss", EVERY, ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 3)])
def test_every_loss_of_masks_takes_the_logistic_form_too(loss: Loss, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn((2, 1, *shape), generator=generator, requires_grad=True)
    targets = (torch.rand((2, *shape), generator=generator) > 0.5).to(torch.uint8)
    value = loss(logit, targets)
    both = torch.cat([torch.zeros_like(logit), logit], dim=1)
    assert value.item() == pytest.approx(loss(both, targets).item(), rel=1e-5)
    value.backward()  # type: ignore[no-untyped-call]
    assert logit.grad is not None and logit.grad.abs().sum() > 0


@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_what_is_right_costs_less(loss: Loss) -> None:
    targets = torch.tensor([[[0, 1], [1, 0]]], dtype=torch.uint8)
    right = torch.stack([1.0 - targets, targets.float()], dim=1) * 4
    assert float(loss(right, targets)) < float(loss(right * 0, targets)) < float(loss(-right, targets))


def test_deep_supervision_weighs_each_level_half_of_the_one_before() -> None:
    generator = torch.Generator().manual_seed(1)
    fine, middle, coarse = (torch.randn((2, 2, side, side), generator=generator) for side in (8, 4, 2))
    targets = torch.zeros(2, 8, 8, dtype=torch.uint8)
    targets[:, :4, :4] = 1  # the same at every resolution
    loss = CrossEntropy()
    parts = [
        loss(output, targets[:, :: 8 // side, :: 8 // side]) for output, side in ((fine, 8), (middle, 4), (coarse, 2))
    ]
    expected = (4 * parts[0] + 2 * parts[1] + parts[2]) / 7
    assert float(loss([fine, middle, coarse], targets)) == pytest.approx(float(expected))
    assert torch.equal(loss([fine], targets), loss(fine, targets))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [*EVERY, RegionDiceCE(((1,), (1,)))], ids=str)
def test_of_outputs_in_half_precision_the_loss_is_what_float32_says_of_them(loss: Loss, half: torch.dtype) -> None:
    """Of a patch with more voxels of a class than float16 has numbers, too, on a processor as on a GPU."""
    drawn = torch.randn(1, 2, 64, 64, 20, generator=torch.Generator().manual_seed(0))
    outputs = (drawn + torch.tensor([0.0, 3.0]).reshape(1, 2, 1, 1, 1)).to(half)
    targets = torch.ones(1, 64, 64, 20, dtype=torch.uint8)
    with torch.autocast("cpu", dtype=half):
        found = loss(outputs.requires_grad_(), targets)
    (gradient,) = torch.autograd.grad(found, outputs)
    wide = outputs.detach().float().requires_grad_()
    expected = loss(wide, targets)
    (exact,) = torch.autograd.grad(expected, wide)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(gradient.float(), exact, rtol=0.01, atol=1e-7)


@pytest.mark.parametrize("loss", [DiceCE(), DiceFocal(), Tversky(), CrossEntropy(), Focal()], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 3, 8, 8, 4), (2, 3, 4, 4, 2), (2, 3)])
def test_maps_of_other_places_are_told(loss: Loss, shape: tuple[int, ...]) -> None:
    """MONAI's DynUNet stacks the maps of its deep supervision; a map may be too small, or none. It ended in errors of
    MONAI's and torch's."""
    told = r"the shape \[batch, classes, 8, 8, 4\] here, and this one gives " + re.escape(str(list(shape)))
    with pytest.raises(ConfigError, match=told):
        loss(torch.zeros(shape), torch.ones(2, 8, 8, 4, dtype=torch.uint8))


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    truth = np.repeat([0, 1, 3], [10, 3, 7])
    loss = CrossEntropy("balanced").informed(["a", "b", "c", "d"], [10, 3, 0, 7])
    weights = compute_class_weight("balanced", classes=np.unique(truth), y=truth)
    outputs, targets = torch.randn(20, 4, generator=torch.Generator().manual_seed(2)), torch.from_numpy(truth)
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    weight = torch.tensor([weights[0], weights[1], 1.0, weights[2]])[targets]
    assert weight.mean() == pytest.approx(1)
    assert float(loss(outputs, targets)) == pytest.approx(float((weight * each).mean()), rel=1e-5)
    halves = [loss(outputs[part], targets[part]) for part in (slice(0, 10), slice(10, 20))]
    assert float(loss(outputs, targets)) == pytest.approx(float(sum(halves)) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tabular("heart", loss=Tversky()), "Tversky is a loss of tasks whose answer is a class for every"),
        (lambda: Classification("skin", loss=DiceCE()), "the answer of Classification is one class a case"),
        (lambda: TimeSeries("har", loss=DiceFocal()), "DiceFocal is a loss of tasks whose answer is a class for every"),
        (lambda: Segmentation("organ", loss=CrossEntropy("balanced")), 'cannot be "balanced" in Segmentation'),
        (lambda: CrossEntropy("equal"), "argument 'weights' of CrossEntropy must be .*got 'equal'"),  # type: ignore[arg-type]
        (lambda: CrossEntropy((1.0, -1.0)), r"numbers of at least 0.*got \[1.0, -1.0\]"),
        (lambda: CrossEntropy((0.0, 0.0)), "not all of them 0"),
        (lambda: CrossEntropy((1.0,)).informed(["no", "yes"], [3, 4]), "1 weights, and there are 2 classes: no, yes"),
        (lambda: CrossEntropy("balanced")(LOGITS, CLASSES), "before it was told the counts"),
        (lambda: Focal(gamma=-1), r"Focal's gamma must be in \[0, 10\], got -1"),
        (lambda: DiceFocal(gamma=10.5), r"Focal's gamma must be in \[0, 10\], got 10.5"),
        (lambda: Tversky(0, 0), "Tversky's alpha and beta must be at least 0, and not both 0"),
    ],
)  # fmt: skip
def test_what_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("loss", [*EVERY, CrossEntropy("balanced")], ids=str)
def test_a_job_names_a_loss_by_its_class(loss: Loss) -> None:
    task = Segmentation("organ", loss=loss) if Target.CLASS not in loss.answers else Tabular("blood", loss=loss)
    spec = spec_of(task)
    assert build(spec, type(task), "task") == task
    given = spec["args"]
    assert isinstance(given, dict) and isinstance(given["loss"], dict)
    assert given["loss"]["path"] in component_classes()


@pytest.mark.slow
def test_the_counts_are_in_no_message(
    tmp_path: Path, make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that two hospitals send is read: neither a weight nor what it is made of is in it."""
    sent, losses = [], {}
    handle = SiteRunner.handle

    def listen(runner: SiteRunner, message: Any) -> Any:
        reply = handle(runner, message)
        sent.append(reply)
        losses[runner.name] = runner.task.loss
        return reply

    monkeypatch.setattr(SiteRunner, "handle", listen)
    job = replace(make_job(rounds=1), task=Tabular("blood", hidden=(4,), loss=CrossEntropy("balanced")))
    run(job, write_table_sites(tmp_path / "sites", ["anna", "berta"]), tmp_path)
    weights = {site: loss._own for site, loss in losses.items() if isinstance(loss, CrossEntropy)}
    assert weights["anna"] != weights["berta"] and all(len(set(own)) == 2 for own in weights.values())
    headers = [reply.header.model_dump_json() for reply in sent]
    assert '"weights":"balanced"' in headers[0] and {type(reply.header).__name__ for reply in sent} >= {
        "InitReply", "TrainReply", "FinishReply",
    }  # fmt: skip
    numbers = torch.tensor([one for own in weights.values() for one in own])
    for header, reply in zip(headers, sent, strict=True):
        assert "_own" not in header and not any(f"{one:.5f}"[:7] in header for one in numbers.tolist())
        for state in reply.slots.values():
            assert not any(torch.isin(tensor.float(), numbers).any() for tensor in state.values())
    models = list(tmp_path.glob("home/*/small/models/*.safetensors"))
    assert models and not any(b"_own" in model.read_bytes() for model in models)
