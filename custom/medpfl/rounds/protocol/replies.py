# SPDX-License-Identifier: Apache-2.0
"""What a hospital answers: a type for each reply. What leaves a hospital is listed from their docstrings."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, JsonValue

from medpfl.data.fingerprint import Fingerprint
from medpfl.privacy.contract import Spent
from medpfl.results.line import ChosenModel, MetricLine, Name, Round
from medpfl.results.schema import Rebuild
from medpfl.rounds.protocol.bounded import (
    Component,
    Count,
    Lines,
    Losses,
    Measures,
    Names,
    Notes,
    Part,
    Positive,
    Text,
    Versions,
)


class Plan(Part):
    """What a hospital will tell and ask for, by its method: the same at all hospitals of a job.

    Attributes:
        models: what is validated in every round, by its deployed name.
        tested: what is tested in the end: these, and what is fine-tuned from them.
        numbers: a method's own numbers about its models (``Method.diagnose``).
        refined: slots that are exchanged again within a round.
        shown: slots of which a hospital is then shown all hospitals' models.
        steps: how many such exchanges follow the training, round by round.
        anew: slots in which a hospital answers with what it holds itself, whatever it was sent.
    """

    models: Names
    tested: Names
    numbers: Names
    refined: Names
    shown: Names
    steps: tuple[Annotated[int, Field(ge=0, le=10_000)], ...]
    anew: Names = ()


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
        common: of the checkpoints and public data that all hospitals must hold alike: name, SHA-256, number of samples;
            where models are encrypted, a digest of the initial weights that only the key's holders can compute.
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
        agreed: digest of the schema that its declaration of the dataset follows, where the job names one.
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
    agreed: Name | None = None


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
        loss: the training loss of the round's last batch, for the first model of each method; None where the batch has
            fewer cases or patients than 'least_scored'.
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


Reply = PlanReply | InitReply | StatisticsReply | TrainReply | RefineReply | ValidateReply | FinishReply | EvaluateReply
