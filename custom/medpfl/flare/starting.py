# SPDX-License-Identifier: Apache-2.0
"""What FLARE 2.9 does not say when a server's or a hospital's kit is started: that it runs already, and that its
certificate has expired. ``medpfl site allow`` puts ``Start`` into a kit.

Two copies of a kit take each other's connection away for ever, and with a certificate that has expired a site tries to
connect for ever; FLARE says nothing about either.
"""

import datetime
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cryptography import x509
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.log_utils import configure_logging

from medpfl.core.errors import MedPFLError
from medpfl.flare.commands import close_commands, refuse_commands, refuse_floods, refuse_others, refuse_uploads
from medpfl.flare.failures import contain_failures
from medpfl.flare.identity import SOON
from medpfl.flare.kit_files import Component, Components, write_file
from medpfl.flare.kits import Kit, read_kit
from medpfl.flare.outliving import FILE as OF_JOBS
from medpfl.flare.outliving import prepare_jobs
from medpfl.flare.plain_jobs import look_first
from medpfl.flare.provision import fingerprint

FILE = "medpfl__p_resources.json"  # by this ending FLARE reads it for the site's own process, not for those of jobs
LOCK = "running.lock"
EXPIRED = "a certificate in its kit has expired"
"""What the server is told of a hospital that takes no job any more."""


class Start(FLComponent):
    """Looks at the kit before the site connects, and at its certificates again before each job, which a hospital whose
    certificate has expired does not take; nor does a site take a job that is not plain (``flare.plain_jobs``), or a
    hospital a command that would show or delete what is its own, or the server one that hospitals are not to give
    (``flare.commands``). At the server one hospital's failure does not end a job (``flare.failures``).

    FLARE tells a component nothing before it connects, and its working folder is the kit then: so the kit is looked at
    where the component is built.
    """

    def __init__(self) -> None:
        super().__init__()
        folder = Path.cwd()
        self._said = logging.getLogger(__name__)
        self._kit = read_kit(folder)
        if self._kit.role == "hospital":  # FLARE takes them after it has connected
            close_commands()
        configure_logging(Workspace(str(folder)))  # FLARE does it later: without it this would not be in log.txt
        try:
            self._folder = hold_folder(folder)
        except MedPFLError as error:  # the other one's daemon looks at the file below
            self._refuse(error)
        try:
            self._machine = hold_name(self._kit)
            self._warn()
        except MedPFLError as error:
            self._stay_away()
            self._refuse(error)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type in (EventType.SYSTEM_START, EventType.BEFORE_CLIENT_REGISTER):
            try:
                self._close(event_type, fl_ctx)
            except Exception:  # noqa: BLE001 (whatever it is, FLARE would go on with a site that is open)
                self._said.exception("This site does not start: it cannot be closed to others")
                self._stay_away()
                os._exit(1)  # threads of FLARE's would keep the process, and the site, alive
        elif event_type == EventType.BEFORE_CHECK_RESOURCE_MANAGER:  # the server asks a hospital whether it takes a job
            try:
                list(soon_over(self._kit))
            except MedPFLError as error:
                # The site's connection stands, but a job's process makes its own: it would end at once, and FLARE ends
                # a whole job then. Without this hospital the others go on.
                self._said.error("This site takes no part in the job: %s", error)
                fl_ctx.set_prop(FLContextKey.JOB_BLOCK_REASON, EXPIRED, private=True, sticky=False)
        elif event_type == EventType.BEFORE_JOB_LAUNCH:
            try:
                self._warn()
            except MedPFLError as error:  # of a server, whose hospitals say so of themselves
                self._said.error(str(error))

    def _close(self, event_type: str, fl_ctx: FLContext) -> None:
        site = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
        if event_type == EventType.BEFORE_CLIENT_REGISTER:
            refuse_others(site.cell)
            return
        look_first()  # FLARE's own validator is there now, and no job has come
        if self._kit.role == "server":
            refuse_commands(site.cell)
            refuse_uploads(site)
            refuse_floods(site.cell)
            contain_failures(site)

    def _stay_away(self) -> None:
        """FLARE's daemon starts a site again whatever it ended by, unless it finds this file."""
        (self._kit.folder / WorkspaceConstants.SHUTDOWN_FILE).touch()

    def _warn(self) -> None:
        for sentence in soon_over(self._kit):
            self._said.warning(sentence)

    def _refuse(self, error: MedPFLError) -> None:
        self._said.error("This site does not start: %s", error)
        raise SystemExit(1) from error


def prepare(kit: Path) -> None:
    """Put ``Start`` into a server's or hospital's kit, and what a server's jobs need; safe to repeat.

    Raises:
        MedPFLError: it cannot be written.
    """
    own = Component(id="medpfl_start", path=f"{Start.__module__}.{Start.__name__}", args={})
    write_file(kit / "local" / FILE, Components(components=[own]))
    if (kit / "startup" / "fed_server.json").is_file():
        prepare_jobs(kit)


def prepared(kit: Kit) -> bool:
    """Whether ``prepare`` was done to it, and not by a version of before it wrote all that it writes."""
    files = [FILE, OF_JOBS] if kit.role == "server" else [FILE]
    return all((kit.local / file).exists() for file in files)


def hold_folder(folder: Path) -> IO[str]:
    """Take the kit's folder for this process, also where several machines or containers share it.

    Raises:
        MedPFLError: another process has it, and who; or it cannot be locked.
    """
    try:
        file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (it is held until the process ends)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read(1000)
            text = f"its kit {folder} runs already, as {who}; stop that one first, or leave it alone"
            raise MedPFLError(text) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} of the machine {socket.gethostname()}")
        file.flush()
    except OSError as error:  # of a full disk only when something is written
        raise MedPFLError(f"cannot lock {folder / LOCK}: {error.strerror}") from error
    return file


def hold_name(kit: Kit) -> socket.socket:
    """Take the name in the kit's certificate on this machine: a copy of the kit may lie in another folder.

    The name of a socket without a file is free again when its process ends, however it ends.

    Raises:
        MedPFLError: another process has it.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0medpfl-{fingerprint(_certificate(kit.certificate))}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MedPFLError(
                f"a copy of the kit of '{kit.name}' runs on this machine already, from another folder than "
                f"{kit.folder}, and each would take the other's connection away: stop that one first, or leave it alone"
            ) from None
        # Only Linux has such names; elsewhere the folder's lock is all there is.
    return held


def soon_over(kit: Kit) -> Iterator[str]:
    """A sentence for each certificate that ends within ``SOON`` days.

    Raises:
        MedPFLError: one has expired.
    """
    now = datetime.datetime.now(datetime.UTC)
    for path in (kit.certificate, kit.root):
        end = _certificate(path).not_valid_after_utc
        if end < now:
            raise MedPFLError(
                f"{path} expired on {end:%Y-%m-%d}, and no other site would let it connect: ask the coordinating "
                f"centre for a new kit (if {now:%Y-%m-%d} is not today's date, set this machine's clock)"
            )
        if (left := (end - now).days) <= SOON:
            yield (
                f"{path} expires on {end:%Y-%m-%d}, in {left} days, and this site does not start after that: ask the "
                "coordinating centre for a new kit"
            )


def _certificate(path: Path) -> x509.Certificate:
    """Raises MedPFLError: it cannot be read."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MedPFLError(f"{path} is damaged ({error})") from error
