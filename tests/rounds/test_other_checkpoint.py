# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that becomes another one while a run that started from it is interrupted."""

from collections.abc import Iterable
from pathlib import Path

import torch
import yaml

from medpfl import store
from medpfl.data.site_file import load_site_file
from medpfl.job import Job
from medpfl.methods.softpull import SoftPull
from medpfl.methods.start import Start
from medpfl.rounds.simulate import simulate
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job

JOB = small_job(method=SoftPull(lr=0.05, batch_size=8, start=Start("known")))


def events(job: Job, sites: dict[str, Path], folder: Path, stop_after: int | None = None) -> str:
    done = simulate(job, sites, folder / "results", folder / "home", stop_after=stop_after)
    return str([f"{event.site}: {event.event}" for event in done.record.events])


def declare(sites: dict[str, Path], names: Iterable[str], number: int) -> None:
    """Let these hospitals name the checkpoint of this number."""
    task = Tabular(dataset="blood", hidden=(4,))
    for name in names:
        data = task.load(load_site_file(sites[name]))
        torch.manual_seed(number)
        file = sites[name].with_name(f"{number}.safetensors")
        store.save(file, task.network(data).state_dict(), {"kind": "checkpoint"})
        content = yaml.safe_load(sites[name].read_text())
        sites[name].write_text(yaml.safe_dump({**content, "checkpoints": {"known": file.name}}))


def test_a_run_begins_anew_from_another_checkpoint_and_says_so(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """It said that its "hospitals, settings or code differ", where none of them did."""
    declare(table_sites, table_sites, 1)
    events(JOB, table_sites, tmp_path, stop_after=1)
    declare(table_sites, ["anna"], 2)
    told = events(JOB, table_sites, tmp_path, stop_after=2)
    assert "anna: takes no part: anna has checkpoint 'known' of SHA-256 " in told
    assert "server: resumed after round 1" in told and "anna: resumed" not in told
    declare(table_sites, table_sites, 2)
    told = events(JOB, table_sites, tmp_path, stop_after=1)
    assert "is kept and not resumed: its hospitals, settings, code, checkpoints, public data or key differ" in told
    declare(table_sites, table_sites, 1)
    told = events(JOB, table_sites, tmp_path)
    assert "server: resumed after round 2" in told and "anna: resumed from the state after round 1" in told
