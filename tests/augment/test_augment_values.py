# SPDX-License-Identifier: Apache-2.0
"""Noise and masking of tables' rows and recordings' windows: seeded, of the stated size, and not for images."""

from typing import Any

import numpy as np
import pytest
import torch

from medpfl.augment.intensity import Noise
from medpfl.augment.listed import augmented
from medpfl.augment.values import Hide, Jitter
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples
from medpfl.models.unet import UNet
from medpfl.tasks.contract import Task
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from medpfl.tasks.time_series import TimeSeries

ROWS, WINDOWS = torch.ones(40, 20), torch.ones(40, 3, 50)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("inputs", [ROWS, WINDOWS, WINDOWS[:, :1]], ids=["rows", "windows", "one channel"])
def test_the_same_seed_changes_alike(inputs: torch.Tensor) -> None:
    both = (Jitter(std=0.2), Hide(share=0.2))
    first, again, other = (augmented(both, inputs, None, seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == inputs.shape and first.dtype == torch.float32 and bool((inputs == 1).all())
    assert augmented((Jitter(prob=0), Hide(prob=0)), inputs, None, seeded(1))[0].equal(inputs)


def test_noise_is_as_strong_as_it_says() -> None:
    found, _ = augmented((Jitter(std=0.5, prob=1),), torch.zeros(400, 50), None, seeded(1))
    each = found.std(dim=1)
    assert 0.2 < float(each.mean()) < 0.3 and float(each.max()) < 0.75  # evenly between 0 and 0.5


def test_features_are_hidden_one_by_one_and_windows_in_a_stretch() -> None:
    rows, _ = augmented((Hide(share=0.2, prob=1),), ROWS, None, seeded(1))
    counts = (rows == 0).sum(dim=1)
    assert set(counts.tolist()) <= {1, 2, 3, 4} and int(counts.max()) == 4 and (rows == 0).any(dim=0).sum() > 15
    windows, _ = augmented((Hide(share=0.2, prob=1),), WINDOWS, None, seeded(1))
    hidden = windows[:, 0] == 0
    assert torch.equal(hidden, windows[:, 2] == 0) and hidden.sum(dim=1).tolist() == [10] * 40
    assert ((hidden[:, 1:].int() - hidden[:, :-1].int()) == 1).sum(dim=1).max() <= 1  # one stretch
    half, _ = augmented((Hide(share=0.2, prob=0.5),), torch.ones(400, 20), None, seeded(1))
    assert 160 < int((half == 0).any(dim=1).sum()) < 240


@pytest.mark.parametrize("task", [Tabular("t", augment=(Jitter(),)), TimeSeries("t", augment=(Hide(), Jitter()))])
def test_tasks_take_them(task: Tabular | TimeSeries) -> None:
    assert task.augments and build(spec_of(task), Task, "task") == task
    inputs = ROWS if isinstance(task, Tabular) else WINDOWS
    samples = Samples(inputs, torch.arange(40) % 2, np.arange(40), [str(n) for n in range(40)])
    chosen = torch.tensor([3, 1, 7])
    found, targets = task.present(samples, chosen, seeded(1))
    assert torch.equal(found, task.present(samples, chosen, seeded(1))[0]) and targets.tolist() == [1, 1, 1]
    assert not type(task)("t").augments


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Segmentation("i", architecture=UNet((2, 4)), size=(8, 8), augment=(Hide(),)), "Hide changes rows"),
        (lambda: Tabular("t", augment=(Noise(),)), "Tabular.augment: Noise changes images"),
        (lambda: TimeSeries("t", augment=(Noise(),)), "TimeSeries.augment: Noise changes images"),
        (lambda: Tabular("t", augment="light"), "presets such as 'light' are for images"),
        (lambda: Hide(share=1.5), "Hide's share must be between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
