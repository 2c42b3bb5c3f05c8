# SPDX-License-Identifier: Apache-2.0
"""How recordings are cut into windows and splits, and what their label is, as site files declare it."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from medpfl.data.declared import LabelColumn, SplitRule, Strict, distinct


class Window(Strict):
    """``length`` and ``step`` in time steps; without ``step`` windows do not overlap."""

    length: int = Field(ge=1)
    step: int | None = Field(default=None, ge=1)


class SeriesLabel(LabelColumn):
    """The column to predict; steps whose value is in ``ignore`` belong to no window."""

    ignore: list[str | int | float] = Field(default=[])

    @field_validator("ignore", mode="before")
    @classmethod
    def _plain(cls, ignore: Any) -> Any:
        if isinstance(ignore, list):
            distinct(ignore)
        return ignore

    @model_validator(mode="after")
    def _ignored_once(self) -> "SeriesLabel":
        distinct([*(value for values in self.classes.values() for value in values), *self.ignore])
        return self


class SeriesSplit(SplitRule):
    """``time``: of each class, the first steps train, the next validate and the last test, in the order of files and
    rows: for a hospital with a single subject. Windows of two splits share no sample, but neighbours in time are
    alike, so results are better than on a new subject. A recording counts as one patient, however many windows it
    has."""

    time: bool = False

    @model_validator(mode="after")
    def _time_alone(self) -> "SeriesSplit":
        if self.stratify:
            raise ValueError("'stratify' is not for series; recordings and subjects are kept together")
        if self.time:
            for other in ("group", "column", "file", "seed"):
                if other in self.model_fields_set:
                    raise ValueError(f"'time' cuts by time alone, so '{other}' has no meaning; leave it out")
        return self
