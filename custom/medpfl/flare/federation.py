# SPDX-License-Identifier: Apache-2.0
"""A whole FLARE federation on this machine: what is the same for POC and for provisioned kits."""

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import InternalError, JobNotFound, NoConnection, SessionClosed
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from medpfl.core.errors import MedPFLError
from medpfl.core.temporary import temporary_place
from medpfl.flare.home import ENVIRONMENT_VARIABLE as HOME_VARIABLE
from medpfl.flare.kits import awkward

START_TIMEOUT = 90  # seconds until server and hospitals must be connected
LOST = (NoConnection, SessionClosed, InternalError)  # what FLARE raises where the server is gone
COMMAND_TIMEOUT = 30.0  # seconds for the server's answer; FLARE waits 5, too short while it decodes models
# A logged error, the last line of a traceback, or the loss of a hospital's process.
_DECISIVE = re.compile(
    r" - (?:ERROR|CRITICAL) - (?:\[[^]]*\] - )?(?!Traceback)(?P<logged>.+)"
    r"|^(?P<raised>(?:\w+\.)*\w*(?:Error|Exception): .+)"
    r"|(?P<lost>Failing job .+ due to reported failure from .+)"  # FLARE logs a killed hospital as information,
    r"|(?P<ended>Job: \S+ child process exit with return code .+)"  # and so the job's own process at the server
)


class LocalFederation(ABC):
    """One server, some hospitals and people, each its own process and folder; no process is left behind.

    Args:
        sites: the hospitals' names.
        port: the server's port; None takes a free one.
        classes: full names of classes outside the package's component folders that jobs may name here.
        workspace: folder for everything, kept afterwards; None takes a temporary one and removes it.

    Attributes:
        relays: those between hospitals and the server to their ports, as ``_provision`` leaves them.
    """

    def __init__(
        self, sites: list[str], port: int | None = None, classes: Sequence[str] = (), workspace: Path | None = None
    ):
        self.sites, self.classes = sites, list(classes)
        self.port = usable_port(port)
        if why := awkward(workspace or temporary_place()):
            raise MedPFLError(f"{why}; name another {'workspace' if workspace else 'folder in TMPDIR'}")
        self._keeps = workspace is not None
        self.workspace = _empty_folder(workspace) if workspace else Path(tempfile.mkdtemp(prefix="medpfl-poc-"))
        self.relays: dict[str, int] = {}
        self._session: Session | None = None
        self._submitted_at: dict[str, int] = {}  # how long the server's console text was then
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._provision()
            self._start()
        except BaseException:  # Ctrl-C included: whatever happens, nothing stays behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._shut_down()
        finally:
            self._log_out()
            self._stop()
            if not self._keeps:
                shutil.rmtree(self.workspace, ignore_errors=True)

    # -- what a kind of federation brings -----------------------------------------------------------------------------

    @abstractmethod
    def kit(self, name: str) -> Path:
        """The startup kit of a hospital, of a relay, of a person, or of "server"."""

    @property
    @abstractmethod
    def submitter(self) -> str:
        """The person who submits the jobs."""

    @abstractmethod
    def _provision(self) -> None:
        """Make the kits and prepare them."""

    @abstractmethod
    def _command(self, name: str) -> list[str]:
        """What starts the server, a relay or a hospital."""

    @abstractmethod
    def _environment(self, name: str) -> dict[str, str]:
        """The environment of that command."""

    @abstractmethod
    def _failed_to_start(self) -> bool:
        """Whether a process of the federation is known to have died while it started."""

    def _shut_down(self) -> None:
        """Ask FLARE to stop; whatever is left afterwards is stopped by signals."""

    # -- using it -----------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        if self._session is None:
            raise NoConnection("nobody is logged in: the server did not answer, or the federation has not started")
        return self._session

    def console_command(self) -> str:
        """Shell command that opens the admin console of the person who submits."""
        return f"PATH={Path(sys.executable).parent}:$PATH bash {self.kit(self.submitter) / 'startup' / 'fl_admin.sh'}"

    def submit(self, job: Path) -> str:
        """Submit a copy of a job folder (FLARE writes signatures into what it submits); returns the job's id."""
        copy = self.workspace / "submitted" / job.name
        shutil.copytree(job, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".__nvfl_*", "__pycache__"))
        start = self._console("server").stat().st_size
        identifier: str = self.session.submit_job(str(copy))
        self._submitted_at[identifier] = start
        return identifier

    def status(self, job_id: str) -> str:
        """FLARE's word for the job's state; "" while the server does not know it yet."""
        try:
            return self.session.get_job_status(job_id) or ""
        except JobNotFound:
            return ""

    def follow(self, job_id: str, name: str, timeout: float, tick: Callable[[], None] = lambda: None) -> str | None:
        """Wait for a job's end; returns a warning where FLARE has one and the results are whole.

        Args:
            name: the job's, for messages.
            timeout: seconds until it is aborted.
            tick: called about twice a second.

        Raises:
            MedPFLError: the job failed (with the log lines that say why) or took too long, or the server is gone.
        """
        deadline = time.monotonic() + timeout
        try:
            while not (status := self.status(job_id)).startswith("FINISHED:"):
                tick()
                if time.monotonic() > deadline:
                    self.session.abort_job(job_id)
                    raise MedPFLError(f"{name} did not finish within {timeout:g} seconds and was aborted")
                time.sleep(0.5)
        except LOST as error:
            said = f"{name} ended with its server, which was killed (out of memory?) or does not answer: {error}"
            raise MedPFLError("\n  ".join([said, *self.decisive_lines(job_id)])) from error
        tick()
        if status == "FINISHED:COMPLETED":
            return None
        if status == "FINISHED:ABNORMAL" and (self.download(job_id) / "summary.json").is_file():
            return f"{name} is complete. FLARE calls it {status} because a hospital left: its events say who, and when"
        raise MedPFLError("\n  ".join([f"{name} failed ({status}):", *self.decisive_lines(job_id)]))

    def run_folder(self, site: str, job_id: str) -> Path:
        """Where FLARE runs a job at a site (or at "server")."""
        return self.kit(site) / job_id

    def job_processes(self, job_id: str) -> dict[str, list[int]]:
        """The processes that run a job now: "server" or hospital to their ids."""
        found: dict[str, list[int]] = {}
        for process in self._members():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                for name in ("server", *self.sites):
                    if job_id in command and f"{self.kit(name)}" in command:
                        found.setdefault(name, []).append(process.pid)
        return found

    def models(self, site: str, job_name: str) -> Path:
        """The folder of the models that a job left at a hospital."""
        return self.kit(site) / "medpfl" / job_name / "models"

    def download(self, job_id: str) -> Path:
        """Download a finished job; returns the folder of what the server wrote."""
        folder = Path(self.session.download_job_result(job_id, str(self.workspace / "downloads")))
        return folder / "workspace" / "results"

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        for name, port in {"server": self.port, **self.relays}.items():
            self._launch(name)
            while not _listening(port):
                self._check_alive(deadline, f"{'the server' if name == 'server' else name} did not start")
        for site in self.sites:
            self._launch(site)
        missing = set(self.sites)
        while missing:
            try:
                if self._session is None:
                    self.log_in(self.submitter)
                missing = set(self.sites) - {client.name for client in self.session.get_system_info().client_info}
            except (*LOST, FLCommunicationError):  # it listens a moment before it knows what to answer
                pass
            if missing:
                said = [f"{name} said last: {self._last_line(name)}" for name in sorted(missing)]
                self._check_alive(deadline, "\n".join([f"not connected: {', '.join(sorted(missing))}", *said]))

    def _last_line(self, name: str) -> str:
        lines = self._console(name).read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "nothing")[:300]

    def _open_session(self, person: str) -> Session:
        with contextlib.redirect_stdout(io.StringIO()):  # FLARE prints that it connects
            session = new_secure_session(person, str(self.kit(person)), timeout=20.0)
        session.set_timeout(COMMAND_TIMEOUT)
        return session

    def log_in(self, person: str) -> None:
        """Be this person from now on, and nobody else.

        Raises:
            NoConnection: the server does not answer; nobody is logged in then.
        """
        self._log_out()
        self._session = self._open_session(person)

    def _log_out(self) -> None:
        """Close the session, whether or not its server still lives: one that is left open goes on looking for its
        server in threads that this process would wait for when it ends."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(*LOST), contextlib.redirect_stdout(io.StringIO()):
                session.close()

    def _check_alive(self, deadline: float, complaint: str) -> None:
        if self._failed_to_start() or time.monotonic() > deadline:
            raise MedPFLError(f"{complaint}:\n" + "\n".join(self.decisive_lines()))
        time.sleep(0.2)

    def _launch(self, name: str) -> None:
        with open(self._console(name), "ab") as console:
            process = subprocess.Popen(
                self._command(name),
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

    def _console(self, name: str) -> Path:
        return self.workspace / f"{name}.console"

    def _own_home(self, folder: Path) -> dict[str, str]:
        """This process's environment with a HOME of its own, for FLARE keeps a registry of kits in the user's, and
        without the volume of a real site: what this federation keeps lies in its workspace."""
        folder.mkdir(parents=True, exist_ok=True)
        dropped = (HOME_VARIABLE, "NVFLARE_")
        keep = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        return {**keep, "HOME": str(folder), "PATH": path, "OMP_NUM_THREADS": "1"}

    # -- taking down --------------------------------------------------------------------------------------------------

    def _members(self) -> list[psutil.Process]:
        """Every process of this federation that still runs: of a session it began, or FLARE's with a folder in its
        workspace. Who else names the workspace (the command that began us, a pager in a log) is none of it."""
        begun = {process.pid for process in self._processes}  # each leads a session of its own
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            parts = process.info["cmdline"] or []
            flares = any(part.startswith("nvflare.") for part in parts)  # its modules, after -m
            named = flares and any(f"{self.workspace}{os.sep}" in part for part in parts)
            ours = named or _session_of(process.pid) in begun
            if ours and process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def _stop(self) -> None:
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            members = self._members()
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            psutil.wait_procs(members, timeout=patience)
        for process in self._processes:
            process.wait(timeout=5)

    # -- what went wrong ----------------------------------------------------------------------------------------------

    def decisive_lines(self, job_id: str | None = None, most: int = 12) -> list[str]:
        """The log lines that say why something failed, with the place they come from."""
        lines: list[str] = []
        for name in ("server", *self.relays, *self.sites):
            for line in self._errors_of(name, job_id):
                text = f"{name}: {line}"
                if text not in lines:
                    lines.append(text)
        return lines[:most] or ["(no error lines in the logs)"]

    def _errors_of(self, name: str, job_id: str | None) -> Iterator[str]:
        # A hospital keeps its run folder; the server removes its own, so there the console since submission counts.
        console, start = self._console(name), 0
        if job_id:
            start = self._submitted_at.get(job_id, 0) if name == "server" else -1
        sources = [(console, start)] if start >= 0 else [(self.run_folder(name, job_id or "") / "log.txt", 0)]
        for file, offset in sources:
            if file.is_file():
                for line in file.read_bytes()[offset:].decode(errors="replace").splitlines():
                    if match := _DECISIVE.search(line):
                        yield match[match.lastgroup or 0].strip()[:300]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended meanwhile
        return None


def _empty_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise MedPFLError(f"the workspace {folder} is not empty; name a new folder")
    except OSError as error:
        raise MedPFLError(f"cannot use the workspace {folder}: {error.strerror}") from error
    return folder.resolve()


def usable_port(port: int | None) -> int:
    """This port of this machine, or a free one.

    Raises:
        MedPFLError: it is in use.
    """
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
