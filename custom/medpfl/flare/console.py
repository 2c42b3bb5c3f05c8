# SPDX-License-Identifier: Apache-2.0
"""What a person's console, or FLARE's Python session, does not do because others say so.

FLARE 2.9 writes what it downloads to whatever place the server names, so that a server could replace any file of the
lead's account, and with it what that account runs. After a failed download FLARE deletes a folder of the server's word.
And the console prints what the server and the hospitals say as it is, with what moves a terminal's cursor.
"""

import hashlib
from pathlib import Path
from typing import IO

from nvflare.fuel.common.ctx import SimpleContext
from nvflare.fuel.hci.client.api_spec import CommandContext
from nvflare.fuel.hci.client.api_status import APIStatus
from nvflare.fuel.hci.client.cli import AdminClient
from nvflare.fuel.hci.client.event import EventHandler
from nvflare.fuel.hci.client.file_transfer import FileTransferModule
from nvflare.fuel.hci.proto import ProtoKey
from pydantic import Field

from medpfl.core.errors import for_terminal
from medpfl.flare.finding import Finding, ok, problem
from medpfl.flare.kit_files import Component, FlareFile, local_file, write_file
from medpfl.flare.kits import Kit

_RESOURCES = "resources.json"
_plain_begin, _plain_pull = AdminClient.__init__, FileTransferModule.pull_binary_file


class Handlers(FlareFile):
    """``local/resources.json`` of a person: FLARE builds its handlers before it connects."""

    handlers: list[Component] = Field(default=[])


class Guard(EventHandler):
    """From where it is built on, what this process downloads stays in FLARE's folder of downloads, and what its console
    prints can be printed."""

    def __init__(self) -> None:
        AdminClient.__init__ = _begin
        FileTransferModule._tx_path = _place
        FileTransferModule.pull_binary_file = _pull

    def handle_event(self, event_type: str, ctx: SimpleContext) -> None:
        """Nothing: FLARE asks for it."""


class _Screen:
    """Where a console writes, in the place of its terminal."""

    def __init__(self, terminal: IO[str]):
        self._terminal = terminal

    def write(self, text: str) -> int:
        return self._terminal.write(for_terminal(text))

    def flush(self) -> None:
        self._terminal.flush()


def _begin(self: AdminClient, *args: object, **named: object) -> None:
    _plain_begin(self, *args, **named)
    self.stdout = _Screen(self.stdout)


def _place(self: FileTransferModule, tx_id: str, folder_name: str) -> str:
    """Where a download is kept until it is whole: FLARE puts the server's word into the path."""
    name = f"{Path(folder_name).name}__{hashlib.sha256(tx_id.encode()).hexdigest()[:32]}"
    return str(Path(self.download_dir, name))


def _pull(self: FileTransferModule, args: list[str], ctx: CommandContext) -> object:
    """One file of a download: its command, FLARE's name of the source, of the transaction and of the file, the folder,
    and the name that the file is to have in it."""
    if len(args) >= 6:
        folder, name = Path(_place(self, args[2], args[4])).resolve(), args[5]
        if folder not in (folder / name).resolve().parents:
            said = f"refused: the server names a file outside of the download's folder, {name!r}; nothing was kept"
            return {ProtoKey.STATUS: APIStatus.ERROR_RUNTIME, ProtoKey.DETAILS: said}
    return _plain_pull(self, args, ctx)


def close_console(kit: Path) -> Path:
    """Put ``Guard`` into a person's kit; safe to repeat.

    Returns:
        The file written: ``local/resources.json``.

    Raises:
        MedPFLError: it cannot be read or written.
    """
    resources = local_file(kit, _RESOURCES, Handlers)
    if not any(map(_is_ours, resources.handlers)):
        resources.handlers = [*resources.handlers, Component(path=f"{Guard.__module__}.{Guard.__name__}")]
    target = kit / "local" / _RESOURCES
    write_file(target, resources)
    return target


def check_console(kit: Kit) -> Finding:
    """Whether a person's kit has it."""
    if any(map(_is_ours, local_file(kit.folder, _RESOURCES, Handlers).handlers)):
        return ok("console", "what the server sends stays in the kit's folder 'transfer'")
    text = "a server could write what it sends to any place of this account"
    return problem("console", text, f"medpfl site allow {kit.folder}")


def _is_ours(handler: Component) -> bool:
    return handler.path == f"{Guard.__module__}.{Guard.__name__}"
