# SPDX-License-Identifier: Apache-2.0
"""A FLARE POC federation on this machine: own HOME, own workspace, free ports, no process left behind."""

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from nvflare.fuel.flare_api.api_spec import JobNotFound, NoConnection
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from medpfl.core.errors import MedPFLError
from medpfl.flare.allow import allow
from medpfl.sites.site_file import ENVIRONMENT_VARIABLE

ADMIN = "admin@medpfl.local"
PROJECT = "medpfl"
START_TIMEOUT = 90  # seconds until server and hospitals must be connected
# A logged error, the last line of a traceback, or the loss of a hospital's process.
_DECISIVE = re.compile(
    r" - (?:ERROR|CRITICAL) - (?:\[[^]]*\] - )?(?!Traceback)(?P<logged>.+)"
    r"|^(?P<raised>(?:\w+\.)*\w*(?:Error|Exception): .+)"
    r"|(?P<lost>Failing job .+ due to reported failure from .+)"  # FLARE logs a killed hospital as information
)


class Federation:
    """One server, some hospitals and an admin, each its own process and folder.

    Args:
        site_files: folder with ``<hospital>.yaml`` for every hospital.
        sites: the hospitals' names.
        port: the server's port; None takes a free one.
        classes: full names of classes outside the package's component folders that jobs may name here.
    """

    def __init__(self, site_files: Path, sites: list[str], port: int | None = None, classes: Sequence[str] = ()):
        self.site_files, self.sites, self.classes = site_files.resolve(), sites, list(classes)
        self.port = _usable_port(port)
        self.workspace = Path(tempfile.mkdtemp(prefix="medpfl-poc-"))
        self.kits = self.workspace / "poc" / PROJECT / "prod_00"
        self._session: Session | None = None
        self._submitted_at: dict[str, int] = {}  # how long the server's console text was then
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Federation":
        try:
            self._provision()
            self._start()
        except BaseException:  # Ctrl-C included: whatever happens, nothing stays behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._session:
            self._session.close()
        self._stop()
        shutil.rmtree(self.workspace, ignore_errors=True)

    @property
    def session(self) -> Session:
        assert self._session is not None, "the federation has not started"
        return self._session

    def console_command(self) -> str:
        """Shell command that opens the admin console; it asks for nothing."""
        return f"PATH={Path(sys.executable).parent}:$PATH bash {self.kits / ADMIN / 'startup' / 'fl_admin.sh'}"

    def submit(self, job: Path) -> str:
        """Submit a copy of a job folder (FLARE writes signatures into what it submits); returns the job's id."""
        copy = self.workspace / "submitted" / job.name
        shutil.copytree(job, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".__nvfl_*", "__pycache__"))
        console = self.workspace / "server.console"
        start = console.stat().st_size
        identifier: str = self.session.submit_job(str(copy))
        self._submitted_at[identifier] = start
        return identifier

    def status(self, job_id: str) -> str:
        """FLARE's word for the job's state; "" while the server does not know it yet."""
        try:
            return self.session.get_job_status(job_id) or ""
        except JobNotFound:
            return ""

    def run_folder(self, site: str, job_id: str) -> Path:
        """Where FLARE runs a job at a site (or at "server")."""
        return self.kits / site / job_id

    def download(self, job_id: str) -> Path:
        """Download a finished job; returns the folder of what the server wrote."""
        folder = Path(self.session.download_job_result(job_id, str(self.workspace / "downloads")))
        return folder / "workspace" / "results"

    # -- setting up ---------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        home = self.workspace / "home"
        home.mkdir(exist_ok=True)
        keep = {key: value for key, value in os.environ.items() if not key.startswith("NVFLARE_")}
        return {
            **keep,
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "NVFLARE_POC_WORKSPACE": str(self.workspace / "poc"),
            # How long the server waits, at a job's end, for a hospital that has disappeared.
            "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20",
            ENVIRONMENT_VARIABLE: str(self.site_files),
            "OMP_NUM_THREADS": "1",
        }

    def _provision(self) -> None:
        participants: list[dict[str, Any]] = [
            {
                "name": "server",
                "type": "server",
                "org": "centre",
                "fed_learn_port": self.port,
                "admin_port": self.port,
                "default_host": "localhost",
            }
        ]
        participants += [{"name": site, "type": "client", "org": site.replace("-", "_")} for site in self.sites]
        participants += [{"name": ADMIN, "type": "admin", "org": "centre", "role": "project_admin"}]
        builders = ["workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder"]
        arguments = [{"template_file": ["master_template.yml"]}, {"config_folder": "config", "scheme": "tcp"}, {}]
        project = {
            "api_version": 3,
            "name": PROJECT,
            "participants": participants,
            "builders": [
                {"path": f"nvflare.lighter.impl.{name}", "args": args}
                for name, args in zip(builders, arguments, strict=True)
            ]
            + [{"path": "nvflare.lighter.impl.signature.SignatureBuilder"}],
        }
        file = self.workspace / "project.yml"
        file.write_text(yaml.safe_dump(project, sort_keys=False))
        (self.workspace / "poc").mkdir()
        command = [sys.executable, "-m", "nvflare.cli", "poc", "prepare", "-i", str(file), "--force"]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        if done.returncode or not self.kits.is_dir():
            raise MedPFLError(f"FLARE could not prepare the federation: {(done.stderr or done.stdout).strip()[-400:]}")
        for name in ("server", *self.sites):
            allow(self.kits / name, self.classes)

    def _start(self) -> None:
        self._launch("server")
        deadline = time.monotonic() + START_TIMEOUT
        while not _listening(self.port):
            self._check_alive(deadline, "the server did not start")
        for site in self.sites:
            self._launch(site)
        while True:
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # FLARE prints that it connects
                    self._session = self._session or new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=20.0)
                if {client.name for client in self._session.get_system_info().client_info} >= set(self.sites):
                    return
            except NoConnection:
                pass
            self._check_alive(deadline, "not all hospitals connected")

    def _check_alive(self, deadline: float, complaint: str) -> None:
        dead = [p for p in self._processes if p.poll() is not None]
        if dead or time.monotonic() > deadline:
            raise MedPFLError(f"{complaint}:\n" + "\n".join(self.decisive_lines()))
        time.sleep(0.2)

    def _launch(self, name: str) -> None:
        # The kit's own script; --once runs it in the foreground, without the daemon that restarts it.
        with open(self.workspace / f"{name}.console", "ab") as console:
            process = subprocess.Popen(
                ["bash", str(self.kits / name / "startup" / "sub_start.sh"), "--once"],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

    # -- taking down --------------------------------------------------------------------------------------------------

    def _members(self) -> list[psutil.Process]:
        """Every process of this federation: FLARE names its workspace in each command line."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if process.pid != os.getpid() and any(
                str(self.workspace) in part for part in process.info["cmdline"] or []
            ):
                found.append(process)
        return found

    def _stop(self) -> None:
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            members = self._members()
            for process in members:
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(members, timeout=patience)
        for process in self._processes:
            process.wait(timeout=5)

    # -- what went wrong ----------------------------------------------------------------------------------------------

    def decisive_lines(self, job_id: str | None = None, most: int = 12) -> list[str]:
        """The log lines that say why something failed, with the place they come from."""
        lines: list[str] = []
        for name in ("server", *self.sites):
            for line in self._errors_of(name, job_id):
                text = f"{name}: {line}"
                if text not in lines:
                    lines.append(text)
        return lines[:most] or ["(no error lines in the logs)"]

    def _errors_of(self, name: str, job_id: str | None) -> Iterator[str]:
        # A hospital keeps its run folder; the server removes its own, so there the console since submission counts.
        console, start = self.workspace / f"{name}.console", 0
        if job_id:
            start = self._submitted_at.get(job_id, 0) if name == "server" else -1
        sources = [(console, start)] if start >= 0 else [(self.run_folder(name, job_id or "") / "log.txt", 0)]
        for file, offset in sources:
            if file.is_file():
                for line in file.read_bytes()[offset:].decode(errors="replace").splitlines():
                    if match := _DECISIVE.search(line):
                        yield match[match.lastgroup or 0].strip()[:300]


def _usable_port(port: int | None) -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise MedPFLError(
                f"port {port} cannot be used: {error.strerror}; leave --port out to take a free one"
            ) from error
        number: int = probe.getsockname()[1]
        return number


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
