# SPDX-License-Identifier: Apache-2.0
"""A FLARE startup kit on disk: whose it is, where its server is, and the files in ``local/`` that a site may change."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from medpfl.core.errors import MedPFLError
from medpfl.flare.kit_files import (
    AdminStartup,
    ClientStartup,
    FlareFile,
    Identity,
    Json,
    Resources,
    ServerStartup,
    read_file,
    write_file,
)

DEFAULT_STORAGE = "/tmp/nvflare"  # where FLARE's template lets a server keep its jobs
HOSPITALS = "medpfl_hospitals.json"  # a server's: the names of the hospitals that were provisioned
STORAGE = "storage"  # where we let it: in the kit's own folder
_FILES: dict[str, Literal["server", "hospital", "admin"]] = {
    "fed_server.json": "server",
    "fed_client.json": "hospital",
    "fed_admin.json": "admin",
}


class Hospitals(FlareFile):
    """``HOSPITALS``."""

    hospitals: list[str] = Field(default=[])


@dataclass(frozen=True)
class Kit:
    """A startup kit: the folder that holds ``startup`` and ``local``.

    ``host`` and ``port`` are the server's, as this kit knows it; ``security`` is FLARE's connection security, "mtls"
    for mutual TLS; ``certificate``, ``key`` and ``root`` are the files of its identity.
    """

    folder: Path
    role: Literal["server", "hospital", "admin"]
    name: str
    host: str
    port: int
    security: str
    certificate: Path
    key: Path
    root: Path

    @property
    def local(self) -> Path:
        """What the site may change."""
        return self.folder / "local"


def read_kit(folder: Path) -> Kit:
    """Read a startup kit.

    Raises:
        MedPFLError: the folder is no startup kit, or its configuration cannot be read.
    """
    startup = folder / "startup"
    found = [name for name in _FILES if (startup / name).is_file()]
    if len(found) != 1:
        raise MedPFLError(f"{folder} is not a startup kit: {startup} has none of {', '.join(_FILES)}")
    file = startup / found[0]
    role = _FILES[found[0]]
    if role == "admin":
        admin = read_file(file, AdminStartup).admin
        name, host, port, security = admin.username, admin.host, str(admin.port), admin.connection_security
        names = (admin.client_cert, admin.client_key, admin.ca_cert)
    else:
        identity: Identity
        if role == "server":
            own = read_file(file, ServerStartup).servers[0]
            identity, name, target = own, own.admin_server, own.service.target
        else:
            client = read_file(file, ClientStartup)
            identity, name, target = client.client, client.client.fqsn.split(".")[-1], client.servers[0].service.target
        host, _, port = target.rpartition(":")
        names, security = (
            (identity.ssl_cert, identity.ssl_private_key, identity.ssl_root_cert),
            identity.connection_security,
        )
    if not port.isdigit():
        raise MedPFLError(f"{file} is not what FLARE 2.9 writes: expected a server's address with a port, got '{port}'")
    certificate, key, root = (startup / name for name in names)
    return Kit(folder, role, name, host, int(port), security, certificate, key, root)


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
