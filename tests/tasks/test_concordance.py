# SPDX-License-Identifier: Apache-2.0
"""The concordance index of many resamples at once is that of each by itself, ties and all."""

import numpy as np
import torch

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.survival import CIndex


def test_resamples_are_scored_as_one_after_another() -> None:
    rng = np.random.default_rng(0)
    undefined = 0
    for cases, spread in ((4, 2), (12, 4), (30, 100)):
        times, events = rng.integers(1, 1 + spread, cases), rng.integers(0, 2, cases)
        targets = torch.tensor(np.stack([times, events], axis=1), dtype=torch.float32)
        samples = Samples(torch.empty(cases, 0), targets, np.arange(cases), [str(one) for one in range(cases)], 0)
        hazards = torch.tensor(rng.integers(0, spread, cases), dtype=torch.float32)
        counts = rng.multinomial(cases, np.full(cases, 1 / cases), size=20)
        expected = Metric.of_resamples(CIndex(), hazards, samples, counts)
        np.testing.assert_allclose(CIndex().of_resamples(hazards, samples, counts), expected, atol=1e-6)
        undefined += int(np.isnan(expected).sum())
    assert undefined > 0


def test_the_end_of_the_study_is_a_pair_too() -> None:
    """An event at the last time came before the end of those who were last seen then without one."""
    hazards, counts = torch.tensor([2.0, 1.0, 1.0]), np.array([[1, 1, 1], [1, 0, 2], [0, 2, 1]])
    targets = torch.tensor([[5.0, 1], [5.0, 0], [5.0, 0]])
    samples = Samples(torch.empty(3, 0), targets, np.arange(3), ["a", "b", "c"], 0)
    assert CIndex().of_split(hazards, samples) == 1.0
    assert CIndex().of_split(-hazards, samples) == 0.0
    assert CIndex().of_resamples(hazards, samples, counts).tolist()[:2] == [1.0, 1.0]
    assert np.isnan(CIndex().of_resamples(hazards, samples, counts)[2])
    every = Samples(torch.empty(2, 0), torch.tensor([[5.0, 1], [5.0, 1]]), np.arange(2), ["a", "b"], 0)
    assert np.isnan(CIndex().of_split(hazards[:2], every))
