# SPDX-License-Identifier: Apache-2.0
"""The unit of a job and that of a hospital's table."""

from pathlib import Path

import pytest

from answers import declare
from medpfl.core.errors import DataError
from medpfl.data.site_file import load_site_file
from medpfl.tasks import Regression, Survival
from medpfl.tasks.contract import Task


@pytest.mark.parametrize(
    ("answer", "column", "task"),
    [
        ("value", "stay", Regression(dataset="ward", unit="hours")),
        ("survival", "days", Survival(dataset="ward", horizons=(1.0,), unit="hours")),
    ],
)
def test_a_job_in_another_unit_than_the_hospitals_is_refused(
    answer: str, column: str, task: Task, tmp_path: Path
) -> None:
    """Days were told as hours, and the risk up to an hour was that up to a day."""

    def informed(**declared: object) -> Task:
        return task.informed(task.load(load_site_file(declare(tmp_path, "anna", answer, **declared))))

    assert informed(units={column: "hours"}) == task and informed() == task
    with pytest.raises(DataError, match=r"is 'hours', and the site file .'units'. says 'days' of it") as told:
        informed(units={column: "days"})
    assert "days" not in told.value.public
