# SPDX-License-Identifier: Apache-2.0
"""What the server asks of a hospital: a type for each request."""

from typing import Literal

from pydantic import FiniteFloat

from medpfl.data.fingerprint import Planned
from medpfl.deployed.model_file import Recipe
from medpfl.results.line import Name, Round
from medpfl.results.schema import BestRound
from medpfl.rounds.protocol.bounded import Component, Names, Part, Positive, Seed, Text


class Told(Part):
    """For codecs that adapt: see ``core.codecs.Progress``."""

    losses: tuple[FiniteFloat, ...]
    scale: FiniteFloat


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
        asked: how many hospitals every round asks; None: all.
        agreed: whether the hospital tells the digest of the schema that its declaration of the dataset follows.
        finetune: rounds of fine-tuning after the last one, at most.
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
    asked: Positive | None = None
    agreed: bool = False
    finetune: Round = 0


class OfRun(Part):
    """What every request after the first says.

    Attributes:
        run: the run's key.
        round: the round that is under way; in the end, the last.
        best: model to its best round so far.
        fresh: no round of this run has asked the hospital before: what it keeps of one is of an earlier run.
        begun: drawn when the run began: one that begins anew with the same key has another.
    """

    run: Name
    round: Round
    rounds: Round
    best: dict[Name, BestRound]
    fresh: bool = False
    begun: Text = ""


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


RunRequest = StatisticsRequest | TrainRequest | RefineRequest | ValidateRequest | FinishRequest
Request = PlanRequest | InitRequest | RunRequest | EvaluateRequest
