# SPDX-License-Identifier: Apache-2.0
"""What one hospital sends does not end the server's process of a job, and with it the job of all hospitals."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.private.fed.app.fl_conf import FLServerStarterConfiger

from medpfl.flare.allow import allow
from medpfl.flare.doctor import examine
from medpfl.flare.kits import read_kit
from medpfl.flare.outliving import FILE, OutliveStreams
from medpfl.flare.provision import provision
from medpfl.flare.starting import prepared

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "ended_cells.py"


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits")).folder


def attacked(attack: str, how: str) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, str(SCRIPT), attack, how], capture_output=True, text=True, timeout=120)
    return ran.returncode, ran.stdout + ran.stderr[-2000:]


@pytest.mark.parametrize("attack", ["undecodable", "too_large"])
def test_a_job_outlives_what_a_hospital_sends(attack: str) -> None:
    code, said = attacked(attack, "as-flare-has-it")
    assert code == 1 and "exiting job process to fail the job" in said  # what it is about: else this tests nothing
    code, said = attacked(attack, "guarded")
    assert code == 0 and "it answers: a task" in said, said


def test_flare_builds_it_for_a_server_s_jobs_before_they_are_reached(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("server.example.org", "hospital-a"):
        allow(kits / name)
        allow(kits / name)
    assert not (kits / "hospital-a" / "local" / FILE).exists()
    kit = kits / "server.example.org"
    monkeypatch.chdir(kit)
    for job, built in (("b9ec50aa-307c-4f3c-b447-45e8cfed5904", True), (None, False)):
        workspace = Workspace(str(kit), "server")
        files = workspace.get_config_files_for_startup(is_server=True, for_job=bool(job))
        assert (str(kit / "local" / FILE) in files) is built
    monkeypatch.setattr(ConfigService, "initialize", lambda **_: None)  # it is the whole process's
    arguments = SimpleNamespace(
        workspace=str(kit), job_id="b9ec50aa-307c-4f3c-b447-45e8cfed5904", log_config=None, set=[]
    )
    found = FLServerStarterConfiger(Workspace(str(kit), "server"), arguments, [])
    found.configure()
    assert [type(one) for one in found.components.values() if "outlive" in type(one).__name__.lower()] == [
        OutliveStreams
    ]


def test_a_kit_of_before_is_told(kits: Path) -> None:
    kit = kits / "server.example.org"
    allow(kit)
    assert prepared(read_kit(kit))
    (kit / "local" / FILE).unlink()
    assert not prepared(read_kit(kit))
    told = [finding for finding in examine(kit) if "end others' jobs" in finding.text]
    assert len(told) == 1 and "medpfl site allow" in (told[0].mend or "")
    allow(kit)
    assert not [finding for finding in examine(kit) if "end others' jobs" in finding.text]
