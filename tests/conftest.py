# SPDX-License-Identifier: Apache-2.0
"""What every test is given: examples that repeat, small hospitals, and a job for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from medpfl.job import Job
from small_jobs import small_job, write_table_sites

# A test run says the same every time. To look for new examples: pytest --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True, deadline=None)  # compiling and a busy machine take time
settings.load_profile("repeatable")


@pytest.fixture
def table_sites(tmp_path: Path) -> dict[str, Path]:
    """Four hospitals with a table each."""
    return write_table_sites(tmp_path / "sites")


@pytest.fixture
def make_job() -> Callable[..., Job]:
    """``small_job``."""
    return small_job
