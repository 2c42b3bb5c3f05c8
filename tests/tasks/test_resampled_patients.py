# SPDX-License-Identifier: Apache-2.0
"""A metric of one's own that goes by cases or patients is resampled as what it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.compare.patients import Kept, read_cases
from medpfl.data.samples import Samples, SiteData
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.sheet import Sheet, sheet_of
from medpfl.tasks.tabular import Tabular

RNG = np.random.default_rng(4)
CASE = np.repeat(np.arange(9), [1, 2, 3, 1, 4, 2, 1, 1, 3])
"""Of each of 18 samples; the 9 cases are of 5 patients."""
PATIENT = np.array([0, 1, 1, 2, 0, 3, 4, 4, 4])
RIGHT = RNG.random(len(CASE)) < 0.6


class OfPatients(Metric):
    """The mean over patients of the mean over their cases of the share of samples that are right."""

    name = "of_patients"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        right = (decisions.argmax(dim=1) == samples.targets[:]).numpy()
        cases = np.array([right[samples.case == case].mean() for case in range(len(samples.names))])
        return float(np.mean([cases[samples.patients == one].mean() for one in range(samples.patients.max() + 1)]))


@dataclass(frozen=True)
class ByPatients(Tabular):
    score: str = "of_patients"
    metrics: ClassVar[tuple[Metric, ...]] = (*Tabular.metrics, OfPatients())


def samples() -> Samples:
    names, owners = [f"case {number}" for number in range(9)], [f"patient {number}" for number in PATIENT]
    return Samples(torch.zeros(len(CASE), 2), torch.ones(len(CASE), dtype=torch.int64), CASE, names, owners=owners)


def decisions() -> Tensor:
    right = torch.from_numpy(RIGHT.astype(np.float32))
    return torch.stack([1 - right, right], dim=1)


def of_each(cases: Sequence[int] = range(9)) -> NDArray[np.float64]:
    """By hand."""
    values = {case: RIGHT[case == CASE].mean() for case in cases}
    patients = sorted({int(PATIENT[case]) for case in cases})
    return np.array([np.mean([values[case] for case in cases if PATIENT[case] == one]) for one in patients])


def counts(patients: int) -> NDArray[np.int64]:
    return RNG.multinomial(patients, [1 / patients] * patients, size=50)


def check(sheet: Sheet, each: NDArray[np.float64]) -> None:
    assert sheet.patients == len(each) and sheet.score == pytest.approx(each.mean())
    drawn = counts(len(each))
    assert sheet.scores(drawn) == pytest.approx(drawn @ each / len(each))


def test_a_patient_who_is_drawn_twice_counts_twice() -> None:
    """Both draws were one patient with every sample twice, and every sample was a patient of its own."""
    check(sheet_of(OfPatients(), decisions(), samples()), of_each())
    alone = replace(samples(), owners=None)
    values = np.array([RIGHT[case == CASE].mean() for case in range(9)])
    check(sheet_of(OfPatients(), decisions(), alone), values)


def test_a_group_of_cases_has_its_patients() -> None:
    chosen = [0, 2, 4, 5, 8]
    some = np.isin(np.arange(9), chosen)
    check(sheet_of(OfPatients(), decisions(), samples()).only(some), of_each(chosen))


def test_a_comparison_keeps_cases_and_patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept of each sample whose it is, and made each a case and a patient of its own: the interval was another
    metric's."""
    task, kept = ByPatients("cells"), Kept(ByPatients("cells"))
    sheet = sheet_of(OfPatients(), decisions(), samples())
    monkeypatch.setattr(kept, "_sheets", lambda deployed, data: {"test": sheet})
    kept.add("Mine", "anna", None, SiteData({"test": samples()}, ["no", "yes"]))  # type: ignore[arg-type]
    kept.write(tmp_path)
    check(read_cases(tmp_path, task)["Mine"]["anna"]["test"], of_each())
