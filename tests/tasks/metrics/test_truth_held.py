# SPDX-License-Identifier: Apache-2.0
"""How often intervals and the choice are right with few patients, of simulated ones: what docs/using-models.md says."""

import numpy as np
import pytest
import torch

from medpfl.data.samples import Samples
from medpfl.deployed.choice import choose
from medpfl.tasks.metrics.certainty import certainty_of
from medpfl.tasks.metrics.labels import AUC
from medpfl.tasks.metrics.masks import Dice
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet

pytestmark = pytest.mark.slow


def answers(metric: AUC | Dice, given: torch.Tensor, truth: torch.Tensor) -> Sheet:
    names = [str(number) for number in range(len(truth))]
    samples = Samples(torch.empty(len(truth), 0), truth, np.arange(len(truth)), names, given.dim())
    return Sheet(metric, given, samples, np.arange(len(truth)))


@pytest.mark.parametrize(("patients", "least", "most"), [(10, 0.62, 0.82), (20, 0.86, 0.97)])
def test_an_auc_of_few_patients_is_less_sure_than_told_and_its_gain_is_not(
    patients: int, least: float, most: float
) -> None:
    rng = np.random.default_rng(0)
    held: list[bool] = []
    gains: list[bool] = []
    while len(held) < 200:
        ill = (rng.random(patients) < 0.35).astype(int)
        level = rng.normal(size=patients) * 0.8 + 1.5 * ill - 0.9
        chances = [1 / (1 + np.exp(-level - 0.6 * rng.normal(size=patients))) for _ in range(2)]
        mine, local = (
            answers(AUC(), torch.from_numpy(np.stack([1 - one, one], axis=1)).float(), torch.from_numpy(ill))
            for one in chances
        )
        found = certainty_of(mine, local, Measure(), 0, len(held), "test")
        if found is not None and found.gained is not None:
            held.append(found.interval[0] <= 0.855 <= found.interval[1])
            gains.append(found.gained[0] <= 0 <= found.gained[1])
    assert least < np.mean(held) < most and np.mean(gains) >= 0.9


@pytest.mark.parametrize(("patients", "others", "least", "most"), [(3, 6, 0.22, 0.38), (3, 1, 0.1, 0.23)])
def test_so_many_hospitals_without_a_gain_leave_their_local_model(
    patients: int, others: int, least: float, most: float
) -> None:
    rng = np.random.default_rng(0)
    left = 0
    for number in range(250):
        level, truth = rng.normal(size=patients), torch.zeros(patients)
        models = [torch.from_numpy(level + 0.7 * rng.normal(size=patients)) for _ in range(1 + others)]
        sheets = {str(place): answers(Dice(), given, truth) for place, given in enumerate(models)}
        left += choose(sheets, "0", Measure(), number, "anna", "validation").model != "0"
    assert least < left / 250 < most
