# SPDX-License-Identifier: Apache-2.0
"""A comparison's runs on FLARE of which not everything can be brought home. Whole ones are in tests/poc."""

import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from comparing import plan_of
from medpfl.flare.compared import do_runs_on
from medpfl.flare.federation import LocalFederation
from small_jobs import write_table_sites


class Ended:
    """A federation whose jobs have ended.

    Attributes:
        gone: hospitals that left no models.
    """

    def __init__(self, folder: Path, sites: list[str]):
        self.folder, self.sites, self.gone = folder, sites, set[str]()

    def submit(self, job: Path) -> str:
        for site in sorted(set(self.sites) - self.gone):
            self.models(site, job.name).mkdir(parents=True)
        (self.folder / "results").mkdir(exist_ok=True)
        (self.folder / "results" / "metrics.jsonl").write_text("x" * 1000)
        return "7"

    def follow(self, job_id: str, name: str, timeout: float, tick: Callable[[], None]) -> None:
        tick()

    def run_folder(self, site: str, job_id: str) -> Path:
        return self.folder / "run"

    def download(self, job_id: str) -> Path:
        return self.folder / "results"

    def models(self, site: str, name: str) -> Path:
        return self.folder / site / name / "models"


def told(federation: Ended, sites: dict[str, Path], folder: Path, room: int | None = None) -> str | None:
    """Why the only run failed; ``room``: bytes that a file may have."""
    reasons: list[str | None] = []

    def tell(run: Any, reason: str | None) -> None:
        reasons.append(reason)

    folder.mkdir()
    plan = plan_of(folder, sites)
    plan = dataclasses.replace(plan, runs=plan.runs[:1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    follow = federation.follow

    def full(job_id: str, name: str, timeout: float, tick: Callable[[], None]) -> None:
        follow(job_id, name, timeout, tick)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))

    federation.follow = full  # type: ignore[method-assign]
    try:
        do_runs_on(cast(LocalFederation, federation), plan, folder / "there", 10, tell, lambda rounds: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return reasons[0]


@pytest.mark.slow
def test_a_hospital_that_left_and_a_full_disk_are_one_sentence_each(tmp_path: Path) -> None:
    """Each ended the whole comparison with a traceback. A limit on the size of files stands for a full disk."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    federation = Ended(tmp_path / "federation", list(sites))
    said = told(federation, sites, tmp_path / "full", room=64)
    assert said is not None and said.startswith("what its job on FLARE left cannot be copied to ")
    assert "File too large" in said
    federation = Ended(tmp_path / "other", list(sites))
    federation.gone = {"berta"}
    said = told(federation, sites, tmp_path / "gone")
    assert said == "berta has no models of it: it was not there when its job on FLARE (7) ended"
