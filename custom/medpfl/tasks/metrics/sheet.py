# SPDX-License-Identifier: Apache-2.0
"""A model's answers to the cases of a split, kept so that the score of any resample of the patients follows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.contract import CaseMetric, Metric, resampled


@dataclass(frozen=True)
class Sheet:
    """It tells of single patients and stays at the hospital.

    Attributes:
        metric: that the answers are scored by.
        answers: of a metric of cases its value of each case, float64; else the decisions, N x ...
        truth: the targets of the split.
        patient: of each answer the number of the patient, from 0.
    """

    metric: Metric
    answers: Tensor
    truth: Samples
    patient: NDArray[np.int64]

    @property
    def patients(self) -> int:
        """How many there are."""
        return int(self.patient.max()) + 1

    def only(self, cases: NDArray[np.bool_]) -> "Sheet":
        """The answers to those of ``truth.names`` that are chosen, at least one; an answer is about a case or a
        sample."""
        of_cases = isinstance(self.metric, CaseMetric)
        kept = cases if of_cases else cases[self.truth.case]
        at, patient = torch.from_numpy(np.flatnonzero(kept)), np.unique(self.patient[kept], return_inverse=True)[1]
        truth = self.truth
        if not of_cases:
            truth = resampled(truth, kept.astype(np.int64))[1]
        return Sheet(self.metric, self.answers[at], truth, patient.astype(np.int64))

    @property
    def score(self) -> float:
        """Of all of them; NaN where it is not defined."""
        return float(self.scores(np.ones((1, self.patients), dtype=np.int64))[0])

    def scores(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The score of each of B resamples; NaN where it is not defined.

        Args:
            counts: B x patients: how often each resample holds each patient.
        """
        each = counts[:, self.patient]
        if isinstance(self.metric, CaseMetric):
            values = self.answers.numpy()
            mean: NDArray[np.float64] = (each * values).sum(axis=1) / each.sum(axis=1)  # as on any number of threads
            return mean
        return self.metric.of_resamples(self.answers, self.truth, each)


def sheet_of(metric: Metric, decisions: Tensor, samples: Samples) -> Sheet:
    """Of decisions about a non-empty split, N x ..., as ``Task.decide`` gives them. Patients of whom nothing is known
    are in no score, so they make none surer."""
    if isinstance(metric, CaseMetric):
        return sheet_of_cases(metric, metric.of_cases(decisions, samples), samples)
    whole, known = Sheet(metric, decisions, samples, samples.patients[samples.case]), samples.known
    return whole if known.all() or not known.any() else whole.only(known)


def sheet_of_cases(metric: CaseMetric, values: Sequence[float], samples: Samples) -> Sheet:
    """The same of the values of ``samples.names``."""
    return Sheet(metric, torch.tensor(values, dtype=torch.float64), samples, samples.patients)
