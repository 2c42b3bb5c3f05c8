# SPDX-License-Identifier: Apache-2.0
"""What one run of a comparison writes, as types: ``run.json``.

A field is a key of the file, under the same name. Files of the same version stay readable.
"""

from typing import Literal

from pydantic import Field

from medpfl.privacy.contract import Spent
from medpfl.results.schema import VERSION, Direction, Event, Scores, Typed
from medpfl.tasks.metrics.measure import Measure

Cross = dict[str, Scores]
"""Hospital whose model it is to hospital whose test data: a score."""
Rows = list[list[float]]
"""A matrix."""


class Initial(Typed):
    """Where a run began: the digest of the task's network, the method's networks that start from it (``same``), and
    those that start from others (``own``)."""

    digest: str
    same: list[str]
    own: list[str]


class _Run(Typed):
    """What every run says of itself; ``split`` None: as the site files cut."""

    version: Literal[1] = VERSION
    seed: int
    split: int | None
    without: str | None
    method: str
    initial: Initial


class SearchRun(_Run):
    """A run that judges arguments: its best mean validation score, or the reason why there is none."""

    score: float | None
    reason: str | None


class Bins(Typed):
    """Calibration on a test set: expected calibration error, Brier score, and by bin the number of cases, how often
    the chosen class was right, and the sum of its probabilities."""

    ece: float
    brier: float
    bins: Rows


class ModelRow(Typed):
    """One deployed model in a run.

    Attributes:
        best_round: chosen by validation; None where nothing was.
        best, last: hospital to its tests.
        curve: mean validation score after each round; None: no number, where the metric is not defined or models broke.
        together: hospital whose model it is to its test on all hospitals' cases.
        calibration: by hospital; None where it is not defined.
        scored: after what it was evaluated, the mixing or local steps; None: the run does not say it.
        one_answer: hospitals all of whose test cases it gives the same class.
    """

    model: str
    best_round: int | None
    best: dict[str, Scores]
    last: dict[str, Scores]
    curve: list[float | None]
    cross: Cross
    together: dict[str, Scores]
    calibration: dict[str, Bins | None]
    scored: str | None = Field(default=None, exclude_if=lambda found: found is None)
    one_answer: list[str] = Field(default_factory=list, exclude_if=lambda found: not found)


class SuperRow(ModelRow):
    """The super model in a run; ``served``: hospital to model to the number of its test cases that this one served."""

    gamma: float | None
    served: dict[str, dict[str, int]]


class TrainedRun(_Run):
    """A run of the comparison itself.

    Attributes:
        rows: label in the tables to its model.
        bytes: that one hospital is sent and sends in a round.
        ratio: how many times fewer bytes travelled than the tensors have; None without a codec.
        sdwd: slot to quantiles of how hospitals' models differ.
        seconds: that one hospital works in a round.
        mixing: slot to its last matrix.
        privacy: hospital to what its noise has cost; empty without noise.
    """

    rows: dict[str, SuperRow | ModelRow]
    bytes: dict[Direction, int]
    ratio: dict[Direction, float] | None = Field(default=None, exclude_if=lambda found: found is None)
    sdwd: dict[str, list[float]]
    seconds: float
    mixing: dict[str, Rows]
    privacy: dict[str, Spent] = Field(default_factory=dict, exclude_if=lambda found: not found)
    events: list[Event]


class Served(Typed):
    """How a model does at a hospital that took no part: each hospital's own (``models``), their mean, and the best of
    them, which nobody could have known."""

    models: Scores
    score: float | None
    best: float | None


class Point(Typed):
    """What another threshold would have given; ``counts``: cases served by each model."""

    gamma: float | None
    score: float | None
    counts: list[int]


class ServedBySuper(Typed):
    """How the super model does there; ``served``: model to number of cases."""

    score: float | None
    best: float | None
    gamma: float | None
    served: dict[str, int]
    cases: int
    points: list[Point]


class UnseenRun(_Run):
    """A run without one hospital, tested there; ``rows``: by label."""

    rows: dict[str, Served | ServedBySuper]


class FoldRun(Typed):
    """A run of a leave-one-out; ``score``: the metric's name, and ``measure``: which of its values are better;
    ``rows``: model to how it does at the hospital."""

    version: Literal[1] = VERSION
    without: str
    seed: int
    score: str
    measure: Measure = Measure()
    cases: int
    rows: dict[str, Served | ServedBySuper]
    events: list[Event]


AnyRun = SearchRun | TrainedRun | UnseenRun | FoldRun
"""What a worker may write."""
