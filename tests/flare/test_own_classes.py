# SPDX-License-Identifier: Apache-2.0
"""A federation on this machine builds the classes of the packages that this machine's user names, and no other's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.core.errors import MedPFLError
from small_jobs import write_table_sites

ROOT = Path(__file__).resolve().parents[2]
METHOD = "bounded_fedavg.BoundedFedAvg"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "ours"
    shutil.copytree(ROOT / "jobs" / "softpull_heart", folder)
    client, server = (folder / "app" / "config" / f"config_fed_{side}.json" for side in ("client", "server"))
    content = json.loads(client.read_text())
    content["executors"][0]["executor"]["args"] = {
        "method": {"path": METHOD, "args": {}},
        "task": {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood"}},
    }
    client.write_text(json.dumps(content))
    server.write_text(json.dumps({**json.loads(server.read_text()), "components": []}))
    return folder


@pytest.mark.parametrize(("verb", "kind"), [("run", "poc.Federation"), ("hospitals", "hospitals.HospitalFederation")])
@pytest.mark.parametrize(("named", "allowed"), [("ledger,bounded_fedavg", [METHOD]), ("", [])])
def test_its_sites_allow_them(
    verb: str, kind: str, named: str, allowed: list[str], job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE refused the job at every site, with a line that was cut off before it named the class."""
    import bounded_fedavg  # noqa: F401 (it is in use already, so that the job can be read however it is named)

    asked: list[Any] = []

    def federation(*arguments: Any, **named: Any) -> None:
        asked.extend(arguments)
        raise MedPFLError("not started")

    monkeypatch.setattr(f"medpfl.flare.{kind}", federation)
    monkeypatch.setenv("MEDPFL_PACKAGES", named)
    write_table_sites(tmp_path / "sites")
    arguments = ["poc", verb, str(job), "--sites", str(tmp_path / "sites"), "--results", str(tmp_path / "results")]
    done = CliRunner().invoke(app, arguments)
    assert "not started" in str(done.exception), done.output
    assert asked[-1] == allowed
