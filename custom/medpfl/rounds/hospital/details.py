# SPDX-License-Identifier: Apache-2.0
"""What a hospital's page shows beyond the chosen model's description: scores of subgroups, and pictures of test cases.
They are kept in a file of their own beside the model, for the job's account only, and never leave the hospital."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from medpfl.core.errors import MedPFLError
from medpfl.data.subgroups import Grouping
from medpfl.deployed.evaluate import write_text
from medpfl.results.schema import number
from medpfl.tasks.metrics.certainty import Interval, certainty_of
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet

ENDING = ".details.json"
Which = Literal["worst", "median", "best"]
LEAST = 5
"""Patients of a group whose score is told; the policy may ask for more."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupScore(_Strict):
    """How the model does in a group of the test patients.

    Attributes:
        column: by which they are told apart, and ``group`` which of its groups it is.
        scored: whether there are patients enough; ``score``: None, too, where it is not defined for them.
        interval: of the score, 95 %; None for few patients.
    """

    column: str
    group: str
    patients: NonNegativeInt
    scored: bool = False
    score: float | None = None
    interval: Interval | None = None


class Pictured(_Strict):
    """A test case. ``said``: what the model made of it; ``png``: the picture in base64; ``outlined``: whether it shows
    the hospital's outline and the model's."""

    which: Which
    case: str
    said: str
    outlined: bool = False
    png: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class Details(_Strict):
    """The file's content."""

    subgroups: tuple[GroupScore, ...] = ()
    pictures: tuple[Pictured, ...] = ()

    def write(self, model: Path) -> None:
        """Beside the file of the model, where there is anything to tell; nothing is left there of an earlier run.

        Raises:
            MedPFLError: the file cannot be written.
        """
        model.with_suffix(ENDING).unlink(missing_ok=True)
        if self != Details():
            write_text(model.with_suffix(ENDING), self.model_dump_json(indent=1), private=True)


def read_details(model: Path) -> Details:
    """Those beside the file of a model; none of a job of an older MedPFL.

    Raises:
        MedPFLError: the file cannot be read, or is not what was written.
    """
    path = model.with_suffix(ENDING)
    if not path.is_file():
        return Details()
    try:
        return Details.model_validate_json(path.read_bytes())
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise MedPFLError(f"{path}: not what a job wrote for the hospital's page") from error


def score_groups(
    sheet: Sheet, groupings: Sequence[Grouping], measure: Measure, least: int, *seed: str | int
) -> tuple[GroupScore, ...]:
    """Of the answers to the test cases, those groups that have some.

    Args:
        least: of patients, by the hospital's policy.
        seed: of the intervals' resamples.
    """
    if len(sheet.patient) != len(sheet.answers):
        return ()  # decisions about every voxel, of a task whose score is none of cases
    return tuple(line for each in groupings for line in _scored(sheet, each, measure, max(least, LEAST), *seed))


def _scored(sheet: Sheet, grouping: Grouping, measure: Measure, least: int, *seed: str | int) -> Iterator[GroupScore]:
    mine = np.array([grouping.of.get(name, -1) for name in sheet.truth.names])
    for place, group in enumerate(grouping.groups):
        if not (mine == place).any():
            continue
        part = sheet.only(mine == place)
        if part.patients < least:
            yield GroupScore(column=grouping.column, group=group, patients=part.patients)
            continue
        sure = certainty_of(part, None, measure, least, *seed, grouping.column)
        yield GroupScore(
            column=grouping.column,
            group=group,
            patients=part.patients,
            scored=True,
            score=number(part.score),
            interval=sure.interval if sure else None,
        )
