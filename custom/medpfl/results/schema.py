# SPDX-License-Identifier: Apache-2.0
"""What a job leaves at the server, as types: ``summary.json``, the lines of ``metrics.jsonl`` and of ``bytes.json``.

``results.files`` writes and reads them; nothing else does. A field is a key of the file, under the same name.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, NonNegativeInt, model_validator
from pydantic_core import PydanticCustomError

from medpfl.data.meaning import Meaning
from medpfl.methods.panels import GraphPanel, Panel
from medpfl.privacy.contract import Spent
from medpfl.tasks.metrics.certainty import Certainty, Interval
from medpfl.tasks.metrics.measure import Measure

VERSION: Literal[1] = 1
"""Of the files' keys. A file without a version is of this one: the first that was published did not say it."""

NO_HOSPITALS = ("mean", "server")
"""Names that stand in the place of a hospital's: of the mean over them, and of the server."""

Direction = Literal["to_site", "from_site"]
Scores = dict[str, Annotated[float, Field(ge=-1e100, le=1e100)] | None]
"""Metric to value, within what a hospital may tell; None stands for NaN and infinities."""
Stretch = tuple[int, int]
"""The first and the last of rounds that follow each other."""


def number(value: object) -> float | None:
    """A metric as JSON can hold it: None stands for NaN and infinities, and for what is no number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class Typed(BaseModel):
    """Base of what is written and read back: unknown keys, other types, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# -- metrics.jsonl ----------------------------------------------------------------------------------------------------


class ValidationLine(Typed):
    """A model's validation as it came out of a round's mixing.

    Attributes:
        site: the hospital; "mean" for the mean of the hospitals that a best round is chosen by.
        model: the deployed model; a method's own diagnosis bears the metric's name here.
        round: whose mixing it was.
    """

    site: str
    model: str
    split: Literal["validation"] = "validation"
    round: NonNegativeInt
    metrics: Scores


class FinalLine(Typed):
    """A model's test at a hospital, after the last round.

    Attributes:
        round: whose mixing made the model; 0 for a given model.
        choice: "best" or "last" round; "given" for a given model.
        certainty: how sure the score is, from the hospital's own patients; None: not known, as in older files.
    """

    site: str
    model: str
    split: Literal["test"] = "test"
    round: NonNegativeInt
    metrics: Scores
    choice: str
    certainty: Certainty | None = Field(default=None, exclude_if=lambda found: found is None)


class ChosenRow(Typed):
    """The model that a hospital's validation cases support: its test, and the gain of choosing so over the local model
    on the validation cases with its interval; None: too few patients to tell."""

    test: FinalLine
    gain: float | None = None
    interval: Interval | None = None


class TrainingLine(Typed):
    """A hospital's local work in a round.

    Attributes:
        seconds: that it took.
        loss: first deployed model of each method to the last batch's loss.
        privacy: what its noise has cost up to this round; None: it has none.
    """

    site: str
    split: Literal["train"] = "train"
    round: NonNegativeInt
    seconds: float | None
    loss: Scores
    privacy: Spent | None = Field(default=None, exclude_if=lambda found: found is None)


class RoundLine(Typed):
    """A round's end at the server.

    Attributes:
        seconds: from its first message on.
        asked: the hospitals that were drawn for it; None: all were asked.
    """

    site: Literal["server"] = "server"
    split: Literal["round"] = "round"
    round: NonNegativeInt
    seconds: float
    asked: list[str] | None = Field(default=None, exclude_if=lambda found: found is None)


MetricLine = ValidationLine | FinalLine
Line = Annotated[ValidationLine | FinalLine | TrainingLine | RoundLine, Field(discriminator="split")]


# -- bytes.json -------------------------------------------------------------------------------------------------------


class Bytes(Typed):
    """Bytes of the tensors that travelled in a round in one direction.

    Attributes:
        round: 0 for the statistics before the first one, and the one after the last for its models' way to the
            hospitals.
        raw: of the tensors themselves.
        encoded: as they travelled.
    """

    round: NonNegativeInt
    site: str
    direction: Direction
    raw: Annotated[int, Field(ge=0, lt=2**63)]
    encoded: Annotated[int, Field(ge=0, lt=2**63)]


class Traffic(Bytes):
    """A line of ``bytes.json``; ``ratio``: raw / encoded, None where nothing travelled."""

    ratio: float | None


# -- summary.json -----------------------------------------------------------------------------------------------------


class Event(Typed):
    """Something out of the ordinary, in a sentence; ``site`` is "server" for the server's own."""

    round: NonNegativeInt
    site: str
    event: str


class BestRound(Typed):
    """The round that validation chose for a model, and the hospitals' mean score there."""

    round: NonNegativeInt
    score: float


class Rebuild(Typed):
    """What rebuilds the networks from the slots at the server: the components' configurations, the shape of one input
    without the batch axis, of the preparation what was not fitted on data, and what the entries of an input mean."""

    method: dict[str, JsonValue]
    task: dict[str, JsonValue]
    input_shape: list[int]
    preparation: dict[str, JsonValue]
    meaning: Meaning = []


class ControllerArguments(BaseModel):
    """The controller's arguments. Those that readers ask for are typed; the others are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, JsonValue]

    rounds: int
    seed: int


class Given(Typed):
    """The model of a job that only evaluates: its name, its components' configurations, its size and its digest."""

    model: str
    method: dict[str, JsonValue]
    task: dict[str, JsonValue]
    parameters: int
    sha256: str


def _have(split: str) -> AfterValidator:
    """Each hospital has a number for this split, which tables show."""

    def check(sizes: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        for site, counts in sizes.items():
            if split not in counts:
                raise PydanticCustomError("sizes", "a number for '{where}'", {"where": f"{site}.{split}"})
        return sizes

    return AfterValidator(check)


def _once(roster: list[str]) -> list[str]:
    if not roster or len(set(roster)) < len(roster):
        raise PydanticCustomError("roster", "hospitals, each once")
    return roster


class About(Typed):
    """What both kinds of jobs say of themselves when they begin.

    Attributes:
        classes: their names; none where the answer is a number.
        metrics: metric to which of its values are better, and their unit; files that do not say it are from before
            there were metrics of which lower values are better.
        sizes: hospital that took part to split to number of samples.
        versions: hospital to package to version.
        components: slot to server component.
        panels: what the method shows of its own in the report.
    """

    classes: list[str]
    metrics: dict[str, Measure] = Field(default_factory=dict)
    sizes: dict[str, dict[str, int]]
    versions: dict[str, dict[str, str]]
    components: dict[str, str]
    panels: list[Panel] = Field(default_factory=list, exclude_if=lambda found: not found)

    def measure(self, metric: str) -> Measure:
        """What is known of a metric."""
        return self.metrics.get(metric, Measure())

    def label(self, metric: str) -> str:
        """What a metric is called in headings."""
        return self.measure(metric).label(metric, self.classes)


class AboutTraining(About):
    """What a training job says of itself.

    Attributes:
        recipe: what rebuilds the networks, as the first hospital said it.
        personalised: the model that the method is there for.
        score: the metric that chooses rounds.
        scored: model to after what it was evaluated: the server's mixing, or local steps. Older files do not say it.
        codecs: by direction, where there are any.
        networks: slot to the pairs of similar hospitals, in files of before: now they are in ``panels``.
        trained: hospital to the stretches of rounds in which it trained; empty in files of before.
        asked: hospital to the stretches of rounds that it was drawn for; empty where every round asked all.
        privacy: hospital to what its noise has cost, as it says itself: in the end, or in its last round where it was
            gone then; empty without noise.
        chosen: hospital to the model that it takes; empty in files of before, and where no local model rides along.
    """

    sizes: Annotated[dict[str, dict[str, int]], _have("train")]
    settings: ControllerArguments
    recipe: Rebuild | None
    personalised: str
    score: str
    codecs: dict[str, JsonValue] | None
    networks: dict[str, list[tuple[str, str]]] = Field(default_factory=dict, exclude_if=lambda found: not found)
    scored: dict[str, str] = Field(default_factory=dict)
    trained: dict[str, list[Stretch]] = Field(default_factory=dict)
    asked: dict[str, list[Stretch]] = Field(default_factory=dict, exclude_if=lambda found: not found)
    privacy: dict[str, Spent] = Field(default_factory=dict, exclude_if=lambda found: not found)
    chosen: dict[str, ChosenRow] = Field(default_factory=dict, exclude_if=lambda found: not found)


class AboutEvaluation(About):
    """What a job that only evaluates a given model says of itself.

    Attributes:
        study: of a super model, hospital to what other thresholds would have given.
    """

    sizes: Annotated[dict[str, dict[str, int]], _have("test")]
    settings: dict[str, JsonValue]
    evaluated: Given
    study: dict[str, JsonValue] = Field(default_factory=dict, exclude_if=lambda found: not found)


class Left(Typed):
    """What every job leaves.

    Attributes:
        medpfl: version of the package at the server.
        written: UTC.
        roster: the hospitals of the federation, sorted.
        best: model to the round that validation chose.
        slots: slot to the SHA-256 of its file in ``slots/``.
        test: the hospitals' tests.
    """

    version: Literal[1] = VERSION
    job: str
    medpfl: str
    written: str
    roster: Annotated[list[str], AfterValidator(_once)]
    best: dict[str, BestRound]
    slots: dict[str, str]
    test: list[FinalLine]
    events: list[Event]


class TrainingSummary(AboutTraining, Left):
    """``summary.json`` of a training job."""

    @model_validator(mode="after")
    def _edges_in_the_roster(self) -> Self:
        _check_edges(self.roster, [*_edges_of(self.panels), *chain.from_iterable(self.networks.values())])
        return self


class EvaluationSummary(AboutEvaluation, Left):
    """``summary.json`` of a job that only evaluates a given model."""

    @model_validator(mode="after")
    def _hospitals_are_known(self) -> Self:
        _check_edges(self.roster, _edges_of(self.panels))
        for line in self.test:
            if line.site not in self.sizes:
                raise PydanticCustomError("sizes", "sizes of each hospital that was tested")
        return self


def _edges_of(panels: Sequence[Panel]) -> list[tuple[str, str]]:
    return [edge for panel in panels if isinstance(panel, GraphPanel) for edge in panel.edges]


def _check_edges(roster: Sequence[str], edges: Iterable[tuple[str, str]]) -> None:
    if not set(chain.from_iterable(edges)) <= set(roster):
        raise PydanticCustomError("edges", "edges between hospitals of the roster alone")


Summary = TrainingSummary | EvaluationSummary


class FailureReport(Typed):
    """``failure.json``: what is known of a job that could not go on."""

    version: Literal[1] = VERSION
    job: str
    reason: str
    events: list[Event]
