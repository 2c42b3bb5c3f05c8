# SPDX-License-Identifier: Apache-2.0
"""What every request and reply is made of: texts, numbers and lists of bounded size.

A type is frozen, refuses unknown keys, other types, NaN and infinities, and bounds every size.
"""

import json
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints

from medpfl.core.errors import printable
from medpfl.results.line import MOST_METRICS, MetricLine, Name, Value
from medpfl.tasks.metrics.measure import Measure

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
