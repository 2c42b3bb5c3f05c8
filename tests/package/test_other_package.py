# SPDX-License-Identifier: Apache-2.0
"""A method from somebody else's package, named in a job by its class path (`compare` with it: test_compare.py)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bounded_fedavg import BoundedFedAvg
from medpfl.cli import app
from medpfl.core.errors import ConfigError
from medpfl.job import load_job
from medpfl.results.files import read_summary
from medpfl.store import read
from small_jobs import write_table_sites

ROOT = Path(__file__).resolve().parents[2]


def job_folder(folder: Path, bound: float) -> Path:
    """softpull_heart with the other package's method on the small tables, as a user would write it."""
    shutil.copytree(ROOT / "jobs" / "softpull_heart", folder)
    client, server = (folder / "app" / "config" / f"config_fed_{side}.json" for side in ("client", "server"))
    content = json.loads(client.read_text())
    content["executors"][0]["executor"]["args"] = {
        "method": {"path": "bounded_fedavg.BoundedFedAvg", "args": {"steps": 5, "lr": 0.5, "bound": bound}},
        "task": {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood"}},
    }
    client.write_text(json.dumps(content))
    content = json.loads(server.read_text())
    content["workflows"][0]["args"] = {"rounds": 2, "references": ["local"], "finetune": 0}
    content["components"] = []
    server.write_text(json.dumps(content))
    return folder


@pytest.mark.slow
def test_a_job_with_it_is_checked_and_simulated(tmp_path: Path) -> None:
    write_table_sites(tmp_path / "sites")
    lengths = {}
    for bound in (0.01, 100.0):
        folder = job_folder(tmp_path / f"job-{bound}", bound)
        job = load_job(folder)
        assert type(job.method) is BoundedFedAvg
        results = tmp_path / f"results-{bound}"
        arguments = ["simulate", str(folder), "--sites", str(tmp_path / "sites"), "--results", str(results)]
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0 and "Common" in done.output and "Local" in done.output
        tensors, _ = read(results / "slots" / "model.safetensors")
        lengths[bound] = torch.cat([tensor.flatten() for tensor in tensors.values()])
    # Two rounds of at most 0.01 from the same start; without the bound the weights go far.
    assert float((lengths[0.01] - lengths[100.0]).norm()) > 0.5


@pytest.mark.slow
def test_a_job_names_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEDPFL_PACKAGES", "ledger")
    write_table_sites(tmp_path / "sites")
    folder = job_folder(tmp_path / "job", 1.0)
    server = folder / "app" / "config" / "config_fed_server.json"
    content = json.loads(server.read_text())
    server.write_text(json.dumps({**content, "trackers": [{"path": "ledger.Ledger", "args": {"title": "ours"}}]}))
    checked = CliRunner().invoke(app, ["check-job", str(folder)], catch_exceptions=False)
    assert "trackers: Ledger(title='ours'" in checked.output
    arguments = ["simulate", str(folder), "--sites", str(tmp_path / "sites"), "--results", str(tmp_path / "results")]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    tests = len(read_summary(tmp_path / "results").test)
    assert tests and f"ours: 2 rounds, {tests} tests" in caplog.text


def test_its_own_mistakes_get_its_own_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BoundedFedAvg's bound must be above 0, got -1"):
        load_job(job_folder(tmp_path / "job", -1.0))
