# SPDX-License-Identifier: Apache-2.0
"""Where no run of a comparison came to its end, the sentence says why the first did not."""

from pathlib import Path

import pytest

from comparing import plan_of
from medpfl.compare.collect import collect
from medpfl.core.errors import MedPFLError
from small_jobs import write_table_sites


@pytest.mark.slow
def test_the_reason_is_told(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, write_table_sites(tmp_path / "sites", ["anna", "berta"]))
    failures = {run.digest: f"{run.name} went wrong" for run in plan.runs}
    with pytest.raises(MedPFLError, match=r"no run of comparison 'small' is finished.*compare: Local went wrong"):
        collect(plan, tmp_path / "results", failures)
