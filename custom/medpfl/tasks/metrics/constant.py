# SPDX-License-Identifier: Apache-2.0
"""Models that answer every case alike: what they score, and whether decisions are such a model's. Where classes are
rare they lead many a table by accuracy."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.data.target import Target

BESIDE: Mapping[str, tuple[str, ...]] = {"accuracy": ("balanced_accuracy", "auc")}
"""Metric that a model which always answers the most frequent class can lead by, to those that stand beside it."""


def most_frequent(counts: Sequence[int]) -> dict[str, float]:
    """Metric to what always answering the most frequent class scores.

    Args:
        counts: samples of each class, of which at least one has some.
    """
    present = sum(count > 0 for count in counts)
    return {"accuracy": max(counts) / sum(counts), "balanced_accuracy": 1 / present, "auc": 0.5}


def one_answer(decisions: Tensor, samples: Samples, target: Target) -> bool:
    """Whether all samples of several classes are decided to be of the same one; False of what is no class."""
    if target is not Target.CLASS or decisions.dim() != 2:
        return False
    found, truth = decisions.argmax(dim=1), samples.targets[:]
    return bool((found == found[0]).all()) and not bool((truth == truth[0]).all())
