# SPDX-License-Identifier: Apache-2.0
"""A kit that is started says why it could not run: it runs already, or its certificate has expired. Real processes. A
site that runs takes no job into which FLARE would put something of its machine."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, SiteType, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.private.fed.app.fl_app_validator import FLAppValidator
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.utils.app_authz import AppAuthzService

from medpfl.core.errors import MedPFLError
from medpfl.flare import starting
from medpfl.flare.allow import allow
from medpfl.flare.doctor import examine
from medpfl.flare.kits import read_kit
from medpfl.flare.provision import Provisioned, provision
from medpfl.flare.starting import EXPIRED, FILE, hold_folder, hold_name, soon_over
from reissued import reissue

ROOT = Path(__file__).resolve().parents[2]
NAME = "hospital-a"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    made = provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits"))
    allow(made.folder / NAME)
    return made


@pytest.fixture
def kit(made: Provisioned, tmp_path: Path) -> Path:
    shutil.copytree(made.folder / NAME, tmp_path / "kit")
    return tmp_path / "kit"


def command(kit: Path, *arguments: str) -> list[str]:
    return ["bash", str(kit / "startup" / "sub_start.sh"), *arguments]


def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "HOME": str(home), "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextmanager
def started(kit: Path) -> Iterator[None]:
    """The site in the foreground, which looks for a server that is not there."""
    with open(kit.parent / "running.txt", "wb") as said:
        site = subprocess.Popen(command(kit, "--once"), stdout=said, stderr=said, env=environment(kit.parent))
        try:
            deadline = time.monotonic() + 60
            while "Retrying" not in (kit.parent / "running.txt").read_text():
                assert site.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            yield
            assert site.poll() is None
        finally:
            site.send_signal(signal.SIGKILL)  # bash gave its place to FLARE's process
            site.wait()


def said(kit: Path, *arguments: str) -> str:
    """What a start says that ends by itself; with a second process if FLARE's daemon does not take it for a failure."""
    done = subprocess.run(
        command(kit, *arguments), env=environment(kit.parent), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.count("This site does not start") == 1
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_second_start_of_a_kit_is_refused(kit: Path) -> None:
    shutil.copytree(kit, kit.parent / "elsewhere")
    with started(kit):
        assert f"its kit {kit} runs already, as process " in said(kit, "--once")
        told = said(kit.parent / "elsewhere")
        assert "a copy of the kit of 'hospital-a' runs on this machine already" in told
        assert "Graceful" in told or "already terminated" in told
        assert "a copy of the kit" in (kit.parent / "elsewhere" / "log.txt").read_text()
    assert not (kit / "shutdown.fl").exists()  # it would end the one that runs
    with started(kit):  # a lock ends with its process, however that ended
        pass


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_an_expired_kit_says_so_once_and_does_not_start(made: Provisioned, kit: Path) -> None:
    reissue(kit, made, -400, -3)
    told = said(kit)
    assert "client.crt expired on 20" in told and "ask the coordinating centre for a new kit" in told
    assert "Graceful" in told or "already terminated" in told  # by itself, whichever of the two was first
    assert not (kit / "daemon_pid.fl").exists()


def test_what_is_held_is_free_again_afterwards(kit: Path) -> None:
    for _ in range(2):
        folder, name = hold_folder(kit), hold_name(read_kit(kit))
        with pytest.raises(MedPFLError, match=f"runs already, as process {os.getpid()} of the machine "):
            hold_folder(kit)
        with pytest.raises(MedPFLError, match="a copy of the kit of 'hospital-a' runs on this machine already"):
            hold_name(read_kit(kit))
        folder.close()
        name.close()


def test_a_kit_on_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """A file that may not grow stands for a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(MedPFLError, match=r"cannot lock .*running\.lock: File too large"):
            hold_folder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    hold_folder(tmp_path).close()


def test_a_certificate_that_ends_soon_is_pointed_out(made: Provisioned, kit: Path) -> None:
    assert not list(soon_over(read_kit(kit)))
    reissue(kit, made, -1, 20)
    (sentence,) = soon_over(read_kit(kit))
    assert "client.crt expires on 20" in sentence and "in 19 days" in sentence


def test_a_site_that_runs_tells_of_its_certificate_before_each_job(
    made: Provisioned, kit: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(kit)  # as FLARE does
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    start, context = starting.Start(), FLContext()
    for end, sentence in ((20, "client.crt expires on 20"), (-1, "client.crt expired on 20")):
        reissue(kit, made, -400, end)
        start.handle_event(EventType.START_RUN, context)
        assert not caplog.messages
        start.handle_event(EventType.BEFORE_JOB_LAUNCH, context)
        assert sentence in caplog.text
        caplog.clear()


def test_a_hospital_whose_certificate_has_expired_takes_no_job(
    made: Provisioned, kit: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its job's process could not connect, and FLARE ends a whole job when one hospital's process fails."""
    monkeypatch.chdir(kit)
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    start = starting.Start()
    for end, reason in ((20, None), (-1, EXPIRED)):
        reissue(kit, made, -400, end)
        context = FLContext()
        start.handle_event(EventType.BEFORE_CHECK_RESOURCE_MANAGER, context)
        assert context.get_prop(FLContextKey.JOB_BLOCK_REASON) == reason
        assert ("takes no part in the job" in caplog.text) is (reason is not None)


def hocon(told: str) -> str:
    """A hospital's configuration whose dataset's name is what FLARE puts in; its first lines include a file."""
    return told + CONFIGURATION[1:-1].replace('"NAME"', "${told}") + "\n"


CONFIGURATION = json.dumps(
    {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {"path": "medpfl.flare.executor.SiteExecutor", "args": {"task": {"dataset": "NAME"}}},
            }
        ],
    }
)


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("config_fed_client.json", CONFIGURATION, ""),
        ("config_fed_client.json", CONFIGURATION.replace("NAME", "{$DB_PASSWORD}"), "names a variable"),
        ("config_fed_client.json", CONFIGURATION.replace("NAME", "{SITE_NAME:>9999999999}"), "names a variable"),
        ("inside/config_fed_client.json", CONFIGURATION.replace("NAME", "kit at {WORKSPACE}"), "names a variable"),
        ("config_fed_server.json", '{"components": [{"args": {"name": "{$DB_PASSWORD}"}}]}', "names a variable"),
        ("config_fed_client.json", "[" * 100_000, "no valid JSON"),
        ("config_fed_client.conf", hocon('include file("PATIENTS")\n'), "from JSON only"),
        ("config_fed_client.conf.default", hocon("told = ${DB_PASSWORD}\n"), "from JSON only"),
    ],
)
def test_a_site_takes_no_job_into_which_flare_would_put_a_file_or_a_variable(
    kit: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, refused: str
) -> None:
    """A dataset's name that no site file declares is repeated to the server."""
    monkeypatch.chdir(kit)
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    monkeypatch.setattr(AppAuthzService, "app_validator", FLAppValidator(SiteType.CLIENT))
    monkeypatch.setattr(ConfigFactory, "_fmt2Loader", dict(ConfigFactory._fmt2Loader))
    (patients := kit.parent / "patients.json").write_text('{"told": "Erna Muster"}')
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    file = kit.parent / "app" / "config" / name
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("PATIENTS", str(patients)))
    starting.Start().handle_event(EventType.SYSTEM_START, FLContext())
    said, _ = AppAuthzService.validate_app(str(kit.parent / "app"))
    assert refused in said and bool(said) is bool(refused)
    assert "Erna" not in said and "hunter2" not in said


def test_a_site_that_cannot_be_closed_does_not_go_on_open(
    kit: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FLARE logs whatever a component raises, and goes on: with another FLARE, say, whose names have changed."""
    monkeypatch.chdir(kit)
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    monkeypatch.setattr(starting.os, "_exit", sys.exit)
    context = FLContext()  # of no site
    start = starting.Start()
    with pytest.raises(SystemExit):
        start.handle_event(EventType.BEFORE_CLIENT_REGISTER, context)
    assert "This site does not start: it cannot be closed to others" in caplog.text
    assert "AttributeError" in caplog.text
    assert (kit / WorkspaceConstants.SHUTDOWN_FILE).exists()  # FLARE's daemon does not start it again


def test_a_server_reads_no_file_for_the_meta_file_of_a_job(
    kit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FLARE shows it to whoever may list the jobs."""
    monkeypatch.chdir(kit)
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    monkeypatch.setattr(AppAuthzService, "app_validator", None)
    monkeypatch.setattr(ConfigFactory, "_fmt2Loader", dict(ConfigFactory._fmt2Loader))
    (secret := tmp_path / "secret.json").write_text('{"name": "what lies at the server"}')
    meta_file = f'include file("{secret}")\nmin_clients = 1\ndeploy_map = {{"app": ["@ALL"]}}'
    job = BytesIO()
    with zipfile.ZipFile(job, "w") as written:
        written.writestr("job/meta.conf", meta_file)
        for name in ("", "config_fed_server.json", "config_fed_client.json"):
            written.writestr(f"job/app/config/{name}", "{}" if name else "")
    starting.Start().handle_event(EventType.SYSTEM_START, FLContext())
    valid, why, meta = JobMetaValidator().validate("job", job.getvalue())
    assert not valid and "from JSON only" in why and "lies at the server" not in f"{why} {meta}"


@pytest.mark.parametrize(("name", "taken"), [("Herz ü", True), ("\x1b[2Jcleared", False), ("a\nCOMPLETED", False)])
def test_a_server_takes_no_job_whose_name_moves_a_console_s_cursor(
    kit: Path, monkeypatch: pytest.MonkeyPatch, name: str, taken: bool
) -> None:
    """FLARE prints it to whoever lists the jobs."""
    monkeypatch.chdir(kit)
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    monkeypatch.setattr(AppAuthzService, "app_validator", None)
    monkeypatch.setattr(ConfigFactory, "_fmt2Loader", dict(ConfigFactory._fmt2Loader))
    job = BytesIO()
    with zipfile.ZipFile(job, "w") as written:
        written.writestr("job/meta.json", json.dumps({"name": name, "min_clients": 1, "deploy_map": {"app": ["@ALL"]}}))
        for file in ("", "config_fed_server.json", "config_fed_client.json"):
            written.writestr(f"job/app/config/{file}", "{}" if file else "")
    starting.Start().handle_event(EventType.SYSTEM_START, FLContext())
    valid, why, _ = JobMetaValidator().validate("job", job.getvalue())
    assert valid is taken, why
    assert taken or "cannot be printed" in why
    assert why.isprintable()


@pytest.mark.parametrize(
    ("name", "others"),
    [
        (NAME, "read every file that this user can read"),
        ("server.example.org", "speak as this server, and end others' jobs"),
    ],
)
def test_the_doctor_names_a_kit_of_before(made: Provisioned, tmp_path: Path, name: str, others: str) -> None:
    kit = tmp_path / "kit"
    shutil.copytree(made.folder / name, kit)
    allow(kit)

    def problems() -> list[str]:
        return [found.text for found in examine(kit) if found.check == "supervision" and found.status == "problem"]

    assert not problems()
    (kit / "local" / FILE).unlink()
    text = "a kit that is started twice, or has expired, would start and say nothing"
    assert problems() == [f"{text}; other hospitals could {others}"]
