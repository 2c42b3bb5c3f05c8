# SPDX-License-Identifier: Apache-2.0
"""What a metric measures: which of its values are better, and their unit. Whatever chooses, ranks, marks or shows
values asks here; nothing else compares two of them."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, StringConstraints

from medpfl.core.errors import printable

Direction = Literal["higher", "lower"]
"""Which values are better."""

TOLERANCE = 1e-9
"""Values that are nearer to a target have reached it."""


class Measure(BaseModel):
    """Travels with a hospital's first answer and is kept in result files; a file that does not say it is older than
    metrics of which lower values are better.

    Attributes:
        direction: which values are better.
        unit: of the values; "" for shares and the like.
        class_number: of the only class that it is about; None: of all.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    direction: Direction = "higher"
    unit: Annotated[str, StringConstraints(max_length=20), AfterValidator(printable)] = ""
    class_number: NonNegativeInt | None = Field(default=None, exclude_if=lambda found: found is None)

    def better(self, one: float, other: float) -> bool:
        """Whether ``one`` is better than ``other``; equal values are not, and NaN is neither better nor worse."""
        return self.gain(one, other) > 0

    def gain(self, score: float, reference: float) -> float:
        """By how much ``score`` is better than ``reference``, in the metric's unit; below 0 where it is worse."""
        return score - reference if self.direction == "higher" else reference - score

    def rank(self, value: float | None) -> float:
        """A number to sort by: the better a value, the smaller; None and NaN come last."""
        if value is None or math.isnan(value):
            return math.inf
        return -value if self.direction == "higher" else value

    def best(self, values: Iterable[float]) -> float:
        """The best of them; NaN where there is none, or none but NaN."""
        return min(values, key=self.rank, default=math.nan)

    def reaches(self, value: float, target: float) -> bool:
        """Whether ``value`` is at least as good as ``target``."""
        return self.gain(value, target) >= -TOLERANCE

    def called(self, name: str, classes: Sequence[str] = ()) -> str:
        """A metric of that name in words: "hd95 of liver" with the classes' names."""
        if self.class_number is not None and self.class_number < len(classes):
            name = f"{name.rpartition('_')[0]} of {classes[self.class_number]}"
        return name.replace("_", " ")

    def label(self, name: str, classes: Sequence[str] = ()) -> str:
        """What a metric of that name is called above a table or beside an axis: "mae (days, lower is better)"."""
        said = [self.unit] if self.unit else []
        if self.direction == "lower":
            said.append("lower is better")
        shown = self.called(name, classes)
        return f"{shown} ({', '.join(said)})" if said else shown

    def text(self, value: float, digits: int = 3) -> str:
        """A value with its unit, in a sentence: "4.200 days"."""
        return f"{value:.{digits}f}{f' {self.unit}' if self.unit else ''}"
