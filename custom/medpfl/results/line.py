# SPDX-License-Identifier: Apache-2.0
"""One evaluation: as a hospital sends it, and as the results keep it with the hospital's name beside it."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints

from medpfl.core.errors import printable
from medpfl.results.schema import ChosenRow, FinalLine, ValidationLine
from medpfl.tasks.metrics.certainty import Certainty, Interval

MOST_ROUNDS = 1_000_000
MOST_METRICS = 200

Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(printable)]
"""Of a network, a metric, a hospital, a slot."""
Value = Annotated[FiniteFloat, Field(ge=-1e100, le=1e100)]
"""A number whose sum over all hospitals is finite still."""
Round = Annotated[int, Field(ge=0, le=MOST_ROUNDS)]


class MetricLine(BaseModel):
    """Metrics of one model on one split. It never names the hospital: the server knows who sent it.

    Attributes:
        model: the deployed name of a model, or the name of a number about the models (``Method.diagnose``).
        round: of the mixing from which the model came; 0 for a model that was given.
        metrics: name to value; None: not defined on these cases.
        choice: of a test, which round's model it was; "given": none of this job's.
        certainty: of a test, how sure the score is; None where the hospital has too few patients to say it.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: Name
    split: Literal["validation", "test"]
    round: Round
    metrics: Annotated[dict[Name, Value | None], Field(max_length=MOST_METRICS)]
    choice: Literal["best", "last", "given"] | None = None
    certainty: Certainty | None = Field(default=None, exclude_if=lambda found: found is None)

    def validated_at(self, site: str) -> ValidationLine:
        """As the results keep it."""
        return ValidationLine(site=site, model=self.model, round=self.round, metrics=dict(self.metrics))

    def tested_at(self, site: str) -> FinalLine:
        """As the results keep it; it must have a choice."""
        return FinalLine(
            site=site,
            model=self.model,
            round=self.round,
            metrics=dict(self.metrics),
            choice=self.choice or "last",
            certainty=self.certainty,
        )


class ChosenModel(BaseModel):
    """Which of its models a hospital's validation cases support (``deployed.choice``).

    Attributes:
        test: the chosen model's test, under its name; "average" is the mean of all its models' probabilities.
        gain: on the validation cases, over the hospital's local model, of the chosen model, or where that is the local
            one of the best other; ``interval``: 95 %, for all candidates at once. None where there are too few patients
            to tell.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    test: MetricLine
    gain: Value | None = None
    interval: Interval | None = None

    def chosen_at(self, site: str) -> ChosenRow:
        """As the results keep it."""
        return ChosenRow(test=self.test.tested_at(site), gain=self.gain, interval=self.interval)
