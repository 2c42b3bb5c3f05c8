# SPDX-License-Identifier: Apache-2.0
"""A FLARE startup kit on disk: whose it is, where its server is, and the files in ``local/`` that a site may change."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from medpfl.core.errors import MedPFLError
from medpfl.flare.kit_files import (
    AdminStartup,
    ClientStartup,
    Communication,
    FlareFile,
    Json,
    Relayed,
    RelayStartup,
    Resources,
    ServerStartup,
    check_entered,
    read_file,
    write_file,
)

DEFAULT_STORAGE = "/tmp/nvflare"  # where FLARE's template lets a server keep its jobs
HOSPITALS = "medpfl_hospitals.json"  # a server's: the names of the hospitals that were provisioned
STORAGE = "storage"  # where we let it: in the kit's own folder
RELAYED = "relay__resources.json"  # FLARE's name for what a hospital knows of its relay, in its folder local
LISTENING = "comm_config.json"  # and for where a relay listens, there
Role = Literal["server", "hospital", "relay", "admin"]


class Hospitals(FlareFile):
    """``HOSPITALS``."""

    hospitals: list[str] = Field(default=[])


@dataclass(frozen=True)
class Kit:
    """A startup kit: the folder that holds ``startup`` and ``local``.

    ``host`` and ``port`` are those that this kit connects to: the server's, as it knows it, or those of the relay that
    it is behind, whose name is ``relay``; ``security`` is FLARE's connection security, "mtls" for mutual TLS;
    ``certificate``, ``key`` and ``root`` are the files of its identity; ``listens``: the port at which others connect
    to it, if they do.
    """

    folder: Path
    role: Role
    name: str
    host: str
    port: int
    security: str
    certificate: Path
    key: Path
    root: Path
    relay: str | None = None
    listens: int | None = None

    @property
    def local(self) -> Path:
        """What the site may change."""
        return self.folder / "local"


def read_kit(folder: Path) -> Kit:
    """Read a startup kit.

    Raises:
        MedPFLError: the folder is no startup kit, or its configuration cannot be read.
    """
    check_entered(folder)
    startup = folder / "startup"
    found = [name for name in _READERS if (startup / name).is_file()]
    if len(found) != 1:
        raise MedPFLError(f"{folder} is not a startup kit: {startup} has none of {', '.join(_READERS)}")
    kit = _READERS[found[0]](folder, startup / found[0])
    behind = kit.local / RELAYED
    if kit.role == "hospital" and behind.is_file():
        relay = read_file(behind, Relayed).relay_config
        host, port = _address(behind, relay.address)
        kit = replace(kit, host=host, port=port, security=relay.security, relay=relay.identity)
    return kit


def is_persons(folder: Path) -> bool:
    """Whether this is the startup kit of a person, who has a console and builds nothing."""
    return (folder / "startup" / _PERSON).is_file()


def _server(folder: Path, file: Path) -> Kit:
    own = read_file(file, ServerStartup).servers[0]
    host, port = _address(file, own.service.target)
    files = _files(file, own.ssl_cert, own.ssl_private_key, own.ssl_root_cert)
    return Kit(folder, "server", own.admin_server, host, port, own.connection_security, *files, listens=port)


def _hospital(folder: Path, file: Path) -> Kit:
    found = read_file(file, ClientStartup)
    own, address = found.client, _address(file, found.servers[0].service.target)
    files = _files(file, own.ssl_cert, own.ssl_private_key, own.ssl_root_cert)
    return Kit(folder, "hospital", own.fqsn.split(".")[-1], *address, own.connection_security, *files)


def _relay(folder: Path, file: Path) -> Kit:
    own = read_file(file, RelayStartup)
    place = read_file(folder / "local" / LISTENING, Communication).internal.resources
    parent = own.connect_to
    security = parent.security if place.connection_security == "mtls" else place.connection_security
    files = _files(file, "client.crt", "client.key", "rootCA.pem")  # its kit does not name them
    return Kit(folder, "relay", own.identity, *_address(file, parent.address), security, *files, listens=place.port)


def _person(folder: Path, file: Path) -> Kit:
    own = read_file(file, AdminStartup).admin
    address = _address(file, f"{own.host}:{own.port}")
    files = _files(file, own.client_cert, own.client_key, own.ca_cert)
    return Kit(folder, "admin", own.username, *address, own.connection_security, *files)


_PERSON = "fed_admin.json"
_READERS: dict[str, Callable[[Path, Path], Kit]] = {
    "fed_server.json": _server,
    "fed_client.json": _hospital,
    "fed_relay.json": _relay,
    _PERSON: _person,
}


def _files(file: Path, certificate: str, key: str, root: str) -> tuple[Path, Path, Path]:
    return file.parent / certificate, file.parent / key, file.parent / root


def _address(file: Path, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit():
        raise MedPFLError(f"{file} is not what FLARE 2.9 writes: expected an address with a port, got '{text}'")
    return host, int(port)


def awkward(folder: Path) -> str | None:
    """Why nothing can run from this folder; None: it can.

    FLARE's scripts name their folder without quotes, and the command that starts a job is cut into words as a shell
    does.
    """
    path = str(folder.resolve())
    try:
        whole = shlex.split(path, comments=True) == [path]
    except ValueError:  # a quote that does not end
        whole = False
    return None if whole else f"FLARE starts nothing in '{path}': a space, a quote, '#' or a backslash is in the path"


def write_hospitals(kit: Path, names: Sequence[str]) -> None:
    """Tell a server's kit which hospitals the federation has."""
    write_file(kit / "local" / HOSPITALS, Hospitals(hospitals=list(names)))


def hospitals_of(local: Path) -> list[str]:
    """The names that ``write_hospitals`` left in a kit's folder ``local``; none where it did not.

    Raises:
        MedPFLError: the file cannot be read.
    """
    file = local / HOSPITALS
    return read_file(file, Hospitals).hospitals if file.exists() else []


def storage_of(resources: Resources) -> dict[str, Path]:
    """Where a server keeps its jobs and its snapshots, by a word for it."""
    return {what: Path(str(place[key])) for what, (place, key) in _storage_places(resources).items()}


def keep_storage(folder: Path, resources: Resources) -> None:
    """Let a server keep its jobs in its kit's folder, as it lies now; another place that a person chose is kept."""
    for what, (place, key) in _storage_places(resources).items():
        path = Path(str(place[key]))
        if path.is_relative_to(DEFAULT_STORAGE) or path.parent.name == STORAGE:
            place[key] = str(folder.resolve() / STORAGE / what)


def _storage_places(resources: Resources) -> dict[str, tuple[Json, str]]:
    places: dict[str, tuple[Json, str]] = {}
    for component in resources.components:
        if component.id == "job_manager" and "uri_root" in component.args:
            places["jobs"] = component.args, "uri_root"
    storage = resources.snapshot_persistor.args.storage.args
    if "root_dir" in storage:
        places["snapshots"] = storage, "root_dir"
    return places
