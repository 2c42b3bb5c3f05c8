# SPDX-License-Identifier: Apache-2.0
"""What acting on a two-class model would bring, threshold by threshold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Decided:
    """The rule "act where the second class's probability is at least ``threshold``" on one split.

    Attributes:
        threshold: in (0, 1).
        sensitivity, specificity: None where the split has no case of that kind.
        benefit: net benefit, at most the share of cases of the second class: the share of true positives less the share
            of false ones, weighed by threshold / (1 - threshold) (Vickers and Elkin, Medical Decision Making 26(6),
            2006). Acting on nobody has 0.
        acting_on_all: the net benefit of that.
    """

    threshold: float
    sensitivity: float | None
    specificity: float | None
    benefit: float
    acting_on_all: float


def decision_curve(
    truth: NDArray[np.bool_], probability: NDArray[np.float64], thresholds: Sequence[float]
) -> list[Decided]:
    """Of N > 0 cases: whether each is of the second class, and the probability that it was given."""
    ill, found = truth.mean(), []
    for threshold in thresholds:
        acted, weight = probability >= threshold, threshold / (1 - threshold)
        found.append(
            Decided(
                threshold=threshold,
                sensitivity=float(acted[truth].mean()) if truth.any() else None,
                specificity=float((~acted)[~truth].mean()) if not truth.all() else None,
                benefit=float((acted & truth).mean() - (acted & ~truth).mean() * weight),
                acting_on_all=float(ill - (1 - ill) * weight),
            )
        )
    return found
