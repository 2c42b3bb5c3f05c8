# SPDX-License-Identifier: Apache-2.0
"""A job made in Python holds what its files could hold, and nothing else."""

import math

import pytest

from medpfl.core.errors import ConfigError
from medpfl.job.settings import Settings
from small_jobs import small_job


@pytest.mark.parametrize("name", ["train_timeout", "init_timeout", "grace"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_times_are_finite(name: str, value: float) -> None:
    """JSON has no infinity: such a job could be written and not be read."""
    with pytest.raises(ConfigError, match=f"the controller's {name} must be"):
        Settings(rounds=1, **{name: value})


def test_a_job_needs_somebody() -> None:
    with pytest.raises(ConfigError, match="min_clients must be at least 1, got 0"):
        small_job(1, min_clients=0)
