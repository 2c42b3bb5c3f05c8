# SPDX-License-Identifier: Apache-2.0
"""``check-job --sites``: who would take part in a job, asked as the server asks it."""

import dataclasses
from pathlib import Path

import pytest

from medpfl.core.codecs import STC, Half
from medpfl.job.codecs import Codecs
from medpfl.rounds.rehearsal import rehearse
from small_jobs import small_job


@pytest.mark.parametrize("codecs", [Codecs(Half(), STC(p=0.2)), Codecs(None, Half()), None])
def test_a_job_with_codecs_can_begin(codecs: Codecs | None, table_sites: dict[str, Path]) -> None:
    """Of every hospital it said that it would not take part, for want of the filter that the job has."""
    found = rehearse(dataclasses.replace(small_job(), codecs=codecs), table_sites)
    assert found.lacking is None and sorted(found.sizes) == sorted(table_sites) and not found.told
