# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire beside tensors: one type for every request of the server and every reply of a hospital.

A type is frozen, refuses unknown keys, other types, NaN and infinities, and bounds every size. Parsing raises a
``ProtocolError`` and nothing else, whatever the bytes. What a reply may say beyond its type is decided by what was
asked: see ``rounds.answers``.
"""

import json
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, StringConstraints

from medpfl.core.errors import ProtocolError, printable
from medpfl.data.fingerprint import Fingerprint, Planned
from medpfl.deployed.model_file import Recipe
from medpfl.privacy.base import Spent
from medpfl.results.line import MOST_METRICS, ChosenModel, MetricLine, Name, Round, Value
from medpfl.results.schema import BestRound, Rebuild
from medpfl.tasks.metrics.measure import Measure

LONGEST = 16 * 2**20
"""Characters of a message without its tensors."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, StringConstraints(max_length=1000), AfterValidator(printable)]
Names = Annotated[tuple[Name, ...], Field(max_length=10_000)]
Notes = Annotated[tuple[Text, ...], Field(max_length=100)]
Lines = Annotated[tuple[MetricLine, ...], Field(max_length=100)]
Measures = Annotated[dict[Name, Measure], Field(max_length=MOST_METRICS)]
Losses = Annotated[dict[Name, Value | None], Field(max_length=100)]
Versions = Annotated[
    dict[Name, Annotated[str, StringConstraints(max_length=100), AfterValidator(printable)]], Field(max_length=20)
]
Component = dict[str, JsonValue]
"""A component's configuration: its class and arguments."""


def as_json(spec: object) -> Component:
    """A configuration as it looks on the wire: JSON has no tuples."""
    found: Component = json.loads(json.dumps(spec))
    return found


class Part(BaseModel):
    """Base of everything here."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Coded(Part):
    """What a codec's end says of a message that it has worked on (see ``rounds.coding``).

    Attributes:
        number: of the exchange.
        base: the exchange whose result is the reference; None: the message is whole.
        keep: an exchange that the hospital must not forget yet.
        codec: tag of the codec; None: this direction is not encoded.
    """

    number: Count
    base: Count | None = None
    keep: Count | None = None
    codec: Name | None = None


class Told(Part):
    """For codecs that adapt: see ``core.codecs.Progress``."""

    losses: tuple[FiniteFloat, ...]
    scale: FiniteFloat


# -- requests ---------------------------------------------------------------------------------------------------------


class PlanRequest(Part):
    """Tell what the volumes are like, so that a network can be planned."""

    task: Literal["plan"] = "plan"
    job: Text
    round: Literal[0] = 0


class InitRequest(Part):
    """Get ready: read the data, build the networks.

    Attributes:
        planned: the network, where the job has it planned.
        slots: slot to whether it travels.
        gradients: slots whose component takes gradients instead of models.
        codec: of what goes to the hospital; a codec's end adds it.
        encryption: how the hospitals encrypt what they send; None: they do not.
    """

    task: Literal["init"] = "init"
    job: Text
    round: Literal[0] = 0
    rounds: Round
    roster: Names
    seed: Seed
    threads: Positive
    slots: dict[Name, bool]
    gradients: Names
    codec: Component | None = None
    planned: Planned | None = None
    encryption: Literal["ckks"] | None = None


class OfRun(Part):
    """What every request after the first says.

    Attributes:
        run: the run's key.
        round: the round that is under way; in the end, the last.
        best: model to its best round so far.
    """

    run: Name
    round: Round
    rounds: Round
    best: dict[Name, BestRound]


class StatisticsRequest(OfRun):
    """Tell statistics of the data, by their names."""

    task: Literal["statistics"] = "statistics"
    names: Names


class TrainRequest(OfRun):
    """Validate the mixed models and train a round from them."""

    task: Literal["train"] = "train"
    progress: Told | None = None


class RefineRequest(OfRun):
    """A further exchange of the refined slots within the round, counted from 1."""

    task: Literal["refine"] = "refine"
    step: Positive


class ValidateRequest(OfRun):
    """Validate what the last round mixed."""

    task: Literal["validate"] = "validate"


class FinishRequest(OfRun):
    """Test; ``finetune``: local rounds of fine-tuning, 0: leave it out."""

    task: Literal["finish"] = "finish"
    finetune: Round


class EvaluateRequest(Part):
    """Test a given model; ``sha256``: of its file."""

    task: Literal["evaluate"] = "evaluate"
    job: Text
    round: Literal[0] = 0
    threads: Positive
    recipe: Recipe
    sha256: Name


# -- replies ----------------------------------------------------------------------------------------------------------


class Plan(Part):
    """What a hospital will tell and ask for, by its method: the same at all hospitals of a job.

    Attributes:
        models: what is validated in every round, by its deployed name.
        tested: what is tested in the end: these, and what is fine-tuned from them.
        numbers: a method's own numbers about its models (``Method.diagnose``).
        refined: slots that are exchanged again within a round.
        shown: slots of which a hospital is then shown all hospitals' models.
        steps: how many such exchanges follow the training, round by round.
    """

    models: Names
    tested: Names
    numbers: Names
    refined: Names
    shown: Names
    steps: tuple[Annotated[int, Field(ge=0, le=10_000)], ...]


class Sizes(Part):
    """Numbers of samples by split.

    Attributes:
        train: of training,
        validation: of validation, and
        test: of the test.
    """

    train: Positive
    validation: Count
    test: Count


class PlanReply(Part):
    """What a hospital's volumes are like.

    Attributes:
        fingerprint: of the training volumes how many there are, the number of channels and classes, the median and the
            tenth percentile of the voxels' distances (mm), and the median shape: along each axis one number of all.
    """

    task: Literal["plan"] = "plan"
    fingerprint: Fingerprint


class InitReply(Part):
    """What a hospital is ready for.

    Attributes:
        sizes: number of samples of each split.
        config: digest of its configuration.
        common: of the checkpoints and public data that all hospitals must hold alike: name, SHA-256, number of samples.
        buffers: names of the entries that travel and are not trained.
        recipe: what rebuilds the networks: the job's method and task, the shape of one prepared input, of the
            preparation what was not fitted on data, and what the entries of an input mean: the names of a table's
            features with their categories and units, the names of a recording's channels.
        personalised: the model that the method is there for.
        score: the metric that chooses rounds; it is among the ``measures``.
        measures: metric to which of its values are better, and their unit.
        classes: the names of the classes.
        versions: of Python, torch and MedPFL.
        plan: what the method will tell and ask for.
        codecs: the codecs by direction; a codec's end adds them.
        adapts: whether one of them goes by the job's progress; a codec's end adds it.
        encryption: fingerprint of the key with which this hospital encrypts; None: it does not.
    """

    task: Literal["init"] = "init"
    sizes: Sizes
    config: Name
    common: dict[Text, Name]
    buffers: tuple[Text, ...]
    recipe: Rebuild
    personalised: Name
    score: Name
    measures: Measures
    classes: Annotated[tuple[Text, ...], Field(max_length=10_000)]
    versions: Versions
    plan: Plan
    codecs: dict[Literal["to_site", "from_site"], Component | None] | None = None
    adapts: bool = False
    encryption: Name | None = None


class StatisticsReply(Part):
    """The statistics are tensors.

    Attributes:
        notes: sentences about this hospital's state on its disk: that it resumed, say.
    """

    task: Literal["statistics"] = "statistics"
    notes: Notes = ()


class TrainReply(Part):
    """A trained round.

    Attributes:
        metrics: of the validation split, for the models as the round before mixed them.
        loss: the training loss of the round's last batch, for the first model of each method.
        notes: sentences about this hospital's state on its disk: that it resumed, say.
        seconds: how long the training took.
        privacy: what the noise has cost so far, this message included: level, epsilon, delta, number of messages.
    """

    task: Literal["train"] = "train"
    round: Round
    metrics: Lines
    loss: Losses
    notes: Notes
    seconds: Annotated[FiniteFloat, Field(ge=0, le=1e9)]
    privacy: Spent | None = None


class RefineReply(Part):
    """The refined slots are tensors."""

    task: Literal["refine"] = "refine"
    round: Round
    step: Positive


class ValidateReply(Part):
    """Metrics of what the last round mixed.

    Attributes:
        metrics: of the validation split, for the models as the last round mixed them.
        notes: as in training.
    """

    task: Literal["validate"] = "validate"
    metrics: Lines
    notes: Notes


class FinishReply(Part):
    """Metrics on the test split.

    Attributes:
        metrics: of the test split, for the best and the last round's models and what was fine-tuned from them.
            Each says how sure its score is: the 95 % interval from the hospital's own patients, the gain over its local
            model and the interval of that; nothing where there are fewer than 6 patients, or than 'least_scored'.
        notes: sentences about models that this hospital does not have, and as in training.
        privacy: what the noise has cost in the whole job.
        chosen: the name of the model that its validation cases support, that model's line, and the gain on these cases
            with its interval; nothing where no local model rides along.
    """

    task: Literal["finish"] = "finish"
    metrics: Lines
    notes: Notes
    privacy: Spent | None = None
    chosen: ChosenModel | None = None


class EvaluateReply(Part):
    """Metrics of the given model.

    Attributes:
        metrics: of the test split.
        measures: metric to which of its values are better, and their unit.
        cases: number of test cases.
        versions: of Python, torch and MedPFL.
        study: of a super model, its scores on the validation and test split for 12 thresholds, and how many cases each
            model served.
    """

    task: Literal["evaluate"] = "evaluate"
    metrics: Annotated[tuple[MetricLine, ...], Field(min_length=1, max_length=1)]
    measures: Measures
    cases: Positive
    versions: Versions
    study: JsonValue = None


RunRequest = StatisticsRequest | TrainRequest | RefineRequest | ValidateRequest | FinishRequest
Request = PlanRequest | InitRequest | RunRequest | EvaluateRequest
Reply = PlanReply | InitReply | StatisticsReply | TrainReply | RefineReply | ValidateReply | FinishReply | EvaluateReply


# -- the text on the wire ---------------------------------------------------------------------------------------------


class Asked(Part):
    """A request as text."""

    content: Annotated[Request, Field(discriminator="task")]
    coded: Coded | None = None


class Answered(Part):
    """A reply as text."""

    content: Annotated[Reply, Field(discriminator="task")]
    coded: Coded | None = None


Envelope = TypeVar("Envelope", Asked, Answered)


def parse(kind: type[Envelope], text: object) -> Envelope:
    """Read a request or a reply.

    Raises:
        ProtocolError: it is none; one sentence with the place and what is wrong there, without what was sent.
    """
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ProtocolError(f"the message is no text of at most {LONGEST} characters")
    try:
        return kind.model_validate_json(text)
    except ValueError as error:  # pydantic's ValidationError, or text that is no Unicode
        raise ProtocolError(f"the message is malformed: {_problem(error)}") from None


def _problem(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return "it is no text"
    first = errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:100] for part in first["loc"][:12])
    told = f"'{where}': {first['msg'][:300].lower()}"
    return "".join(letter if letter.isprintable() else "?" for letter in told)  # keys are what somebody sent
