# SPDX-License-Identifier: Apache-2.0
"""What a comparison writes of all its runs, as types: ``results.json`` with all that the tables need.

A field is a key of the file, under the same name. Files of the same version stay readable: published results are.
"""

from typing import Literal

from pydantic import Field, JsonValue, field_serializer

from medpfl.compare.file import Comparison
from medpfl.compare.run_results import Bins, FoldRun, Initial, Rows
from medpfl.privacy.contract import Spent
from medpfl.results.schema import VERSION, Direction, Event, Typed
from medpfl.tasks.metrics.certainty import Interval
from medpfl.tasks.metrics.digits import digits
from medpfl.tasks.metrics.measure import Measure


class LeaveOneOut(Typed):
    """``leave-one-out.json``; ``models``: references first; ``measure``: which scores are better."""

    version: Literal[1] = VERSION
    score: str
    measure: Measure = Measure()
    hospitals: list[str]
    seeds: list[int]
    models: list[str]
    runs: list[FoldRun]


class Stat(Typed):
    """Mean and sample deviation over the runs (None where a value is missing; no deviation of one run)."""

    mean: float | None
    sd: float | None
    values: list[float | None]


class MetricStat(Stat):
    """The hospitals' mean, and hospital by hospital (the first published files do not say it)."""

    hospitals: dict[str, Stat] = Field(default_factory=dict)


class Needed(Typed):
    """``seeds`` that would show a difference, of several splits so many of these (None: none do, or too many); so many
    ``times`` the test patients."""

    seeds: int | None
    times: float | None


class Gain(Typed):
    """Paired differences of two scores, above 0 where the first is better.

    Attributes:
        mean: of the differences.
        deviation: sample standard deviation of the differences; None for a single pair.
        p: two-sided p-value in (0, 1]; None for a single pair.
        wins: pairs with a positive difference; ``losses``: with a negative one.
        pairs: number of pairs.
        splits: that have them, where some have several, whose mean counts in the p; None: each pair counts by itself.
        interval: of the mean, 95 %, from patients and seeds, or from splits; None: not known, as in files of before.
        needed: what would show a difference of this size; None likewise.
    """

    mean: float
    deviation: float | None
    p: float | None
    wins: int
    losses: int
    pairs: int
    splits: int | None = Field(default=None, exclude_if=lambda found: found is None)
    interval: Interval | None = Field(default=None, exclude_if=lambda found: found is None)
    needed: Needed | None = Field(default=None, exclude_if=lambda found: found is None)

    @property
    def shown_p(self) -> float | None:
        """The p, where so many pairs can give one below 0.05, which takes 6; without an interval, whatever it is."""
        return self.p if self.interval is None or (self.splits or self.pairs) >= 6 else None


class HospitalRow(Typed):
    """A method's test at one hospital, at the best and at the last round, and its gain over local training there."""

    best: Stat
    last: Stat
    gain: Gain | None


class ChosenRow(Typed):
    """What hospitals would take by their validation cases, with the references and some methods' models to choose from.

    Attributes:
        name: of the method whose models they had beside the references, or that they had all.
        score: test score of what they took, mean of the hospitals.
        gain: over local training; None without it.
        hospitals: hospital by hospital.
        picks: hospital to row (or "average") to the number of runs in which it was taken.
        below: hospitals whose gain is surely below zero: its whole interval is.
    """

    name: str
    score: Stat
    gain: Gain
    hospitals: dict[str, Gain]
    picks: dict[str, dict[str, int]]
    below: list[str]


class Worst(Typed):
    """The hospital with the worst mean score."""

    hospital: str
    score: float


class Reach(Typed):
    """When the mean validation score reached the target: the round of each run (None: it did not), their median, and
    what one hospital had sent and received and how long it had worked by then."""

    rounds: list[int | None]
    median_round: float | None
    reached: int
    bytes_per_hospital: int | None
    seconds: float | None


class Made(Typed):
    """How a row was made, as the components show themselves."""

    method: str
    slots: dict[str, str]
    codecs: str | None = Field(default=None, exclude_if=lambda found: found is None)


class Selection(Typed):
    """Of a super model: each run's gamma, and hospital to model to the share of its test cases."""

    gammas: list[float | None]
    served: dict[str, dict[str, float]]


class Mixing(Typed):
    """The last matrix of each slot of the run with this split and seed."""

    split: int | None
    seed: int
    slots: dict[str, Rows]


class Row(Typed):
    """One row of the leaderboard with all that belongs to it.

    Attributes:
        made: in how many ways; several where a search chose split by split.
        own_networks: networks of the method that do not start from the task's weights.
        pairs: split and seed of each run, in the order of every list of runs below.
        metrics: of the best round, each hospital's model on its own cases; ``together``: on all hospitals'.
        curve: mean of ``curves`` by round, of the runs that have a score there.
        cross: row: whose model; column: whose test data; mean over the runs.
        to_first: how far it is from the first row, the one with the best mean that hospitals can have (not Pooled's),
            below 0 where it is worse; None: it is the first itself, or that is not known, as in files of before.
        scored: after what its models were evaluated, the mixing or local steps; None: not known.
        one_answer: hospital to the number of runs in which the model gives all its test cases the same class.
        privacy: hospital to what its noise has cost in the run where that is most; empty without noise.
    """

    name: str
    made: list[Made]
    own_networks: list[str]
    pairs: list[tuple[int | None, int]]
    best: Stat
    last: Stat
    best_rounds: list[int | None]
    metrics: dict[str, MetricStat]
    together: dict[str, MetricStat]
    gain: Gain | None
    to_first: Gain | None = Field(default=None, exclude_if=lambda found: found is None)
    hospitals: dict[str, HospitalRow]
    worst: Worst | None
    curve: list[float | None]
    curves: list[list[float | None]]
    bytes: dict[Direction, int]
    ratio: dict[Direction, float] | None = None
    sdwd: dict[str, list[float]] = Field(default_factory=dict)
    seconds: Stat
    reach: Reach | None
    cross: list[list[float | None]]
    calibration: dict[str, Bins] | None
    selection: Selection | None
    one_answer: dict[str, int] = Field(default_factory=dict, exclude_if=lambda found: not found)
    privacy: dict[str, Spent] = Field(default_factory=dict, exclude_if=lambda found: not found)
    mixing: Mixing
    scored: str | None = Field(default=None, exclude_if=lambda found: found is None)


class SplitRow(Typed):
    """One way to cut all hospitals' data: hospital to digest, to split to number of samples, to class to number."""

    seed: int | None
    digests: dict[str, str]
    sizes: dict[str, dict[str, int]]
    labels: dict[str, dict[str, int]]


class SweepPoint(Typed):
    """A value, and the name under which it is compared."""

    value: JsonValue
    name: str


class Sweep(Typed):
    """A sweep's method, argument and points."""

    method: str
    argument: str
    points: list[SweepPoint]


class Candidate(Typed):
    """Arguments that a search judged: the scores of its runs, their mean, and why it failed, if it did."""

    values: dict[str, JsonValue]
    scores: list[float | None]
    mean: float | None
    reason: str | None
    finished: bool


class SearchResult(Typed):
    """What a search found; ``chosen``: the best candidate's place, the first among equals; None: there is none."""

    method: str
    split: int | None
    candidates: list[Candidate]
    chosen: int | None


class UnseenRow(Typed):
    """What the others' models reach at hospitals that took no part, and the mean where each was left out."""

    name: str
    mean: Stat | None
    hospitals: dict[str, Stat]


class FailedRun(Typed):
    """A run that is missing, and why."""

    run: str
    reason: str


class RunRow(Typed):
    """A run that is in the tables; ``digest`` names its folder."""

    method: str
    split: int | None
    seed: int
    without: str | None
    digest: str
    initial: Initial
    events: list[Event] | None


class Versions(Typed):
    """What computed it."""

    medpfl: str
    torch: str
    python: str
    machine: str


class Results(Typed):
    """``results.json``.

    Attributes:
        comparison: its name; ``file``: what its file says.
        score: the metric that the tables are about.
        metrics: metric to which of its values are better, and their unit; the first published files do not say it.
        pairs: splits times seeds.
        test: the permutation test, in words; ``smallest_p``: that it can give.
        target: validation score whose round and bytes are reported.
        tuning: the searches; None without any.
        chosen: what hospitals would take by their validation cases; none in files of before.
    """

    version: Literal[1] = VERSION
    comparison: str
    file: Comparison
    score: str
    metrics: dict[str, Measure] = Field(default_factory=dict)
    hospitals: list[str]
    splits: list[SplitRow]
    seeds: list[int]
    pairs: int
    versions: Versions
    written: str
    test: str
    smallest_p: float
    target: float | None
    tuning: list[SearchResult] | None
    rows: list[Row]
    sweeps: list[Sweep]
    unseen: list[UnseenRow]
    chosen: list[ChosenRow] = Field(default_factory=list, exclude_if=lambda found: not found)
    failures: list[FailedRun]
    runs: list[RunRow]

    @property
    def measure(self) -> Measure:
        """Which scores are better, and their unit."""
        return self.metrics.get(self.score, Measure())

    def label(self, metric: str) -> str:
        """What a metric is called in headings."""
        return self.metrics.get(metric, Measure()).label(metric)

    def decimals(self, metric: str) -> int:
        """With how many decimals a metric's values are written, in all tables and figures."""
        known = [found for row in self.rows for found in (row.metrics.get(metric), row.together.get(metric)) if found]
        told: list[Stat | None] = [*known, *(stat for found in known for stat in found.hospitals.values())]
        if metric == self.score:
            told += [stat for row in self.rows for stat in (row.best, row.last)]
            told += [stat for row in self.rows for site in row.hospitals.values() for stat in (site.best, site.last)]
            told += [stat for row in self.unseen for stat in (row.mean, *row.hospitals.values())]
        return digits(stat.mean for stat in told if stat)

    @field_serializer("file")
    def _as_written(self, file: Comparison) -> dict[str, JsonValue]:
        said: dict[str, JsonValue] = file.model_dump(mode="json", exclude_none=True)
        return said
