# SPDX-License-Identifier: Apache-2.0
"""What one hospital sends does not end the server's process of a job, and with it the job of all hospitals."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.private.fed.app.fl_conf import FLServerStarterConfiger
from nvflare.private.fed.server.server_runner import ServerRunner, ServerRunnerConfig

from in_process import Engine, new_workspace
from medpfl.flare.allow import allow
from medpfl.flare.controller import MixingController
from medpfl.flare.doctor import examine
from medpfl.flare.kits import read_kit
from medpfl.flare.outliving import FILE, OutliveStreams
from medpfl.flare.provision import provision
from medpfl.flare.starting import prepared
from medpfl.flare.wire import failure_of

ROOT = Path(__file__).resolve().parents[2]
FLARES = list(ServerRunner.ABORT_RETURN_CODES)
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


class Asked(Engine):
    """With what FLARE's runner asks of it beside."""

    def register_aux_message_handler(self, **_: object) -> None: ...


@pytest.mark.parametrize("code", [ReturnCode.UNSAFE_JOB, ReturnCode.TASK_UNKNOWN, ReturnCode.RUN_MISMATCH])
def test_a_hospital_that_says_the_job_is_unsafe_or_unknown_to_it_ends_its_own_part_alone(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE's runner ended the job at all hospitals, whoever said so."""
    engine, answered = Asked("server", new_workspace(tmp_path, "server"), {"name": "a job"}, []), list[str | None]()
    communicator = SimpleNamespace(
        client_is_active=lambda *_: None,
        process_submission=lambda result, **_: answered.append(failure_of(result)),
    )
    runner = ServerRunner(ServerRunnerConfig(60, 1.0, [], {}, {}), "job-1", engine)
    runner.status, runner.current_wf = (
        "started",
        SimpleNamespace(id="w", controller=SimpleNamespace(communicator=communicator)),
    )
    peer = FLContext()
    peer.set_prop(ReservedKey.RUN_NUM, "job-1", private=False)

    def answer() -> str | None:
        with engine.new_context() as context:
            context.set_peer_context(peer)
            runner.process_submission(Client("anna", "token"), "train", "1", make_reply(code), context)
        return engine.panic

    monkeypatch.setattr(ServerRunner, "ABORT_RETURN_CODES", FLARES)
    assert f"due to fatal return code {code} from client anna" in str(answer()) and not answered
    engine.panic = None
    context = FLContext()
    context.get_engine = lambda **_: engine  # type: ignore[method-assign]
    MixingController(rounds=1).start_controller(context)
    assert answer() is None and answered == [code]


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
