# SPDX-License-Identifier: Apache-2.0
"""A FLARE startup kit on disk: whose it is, where its server is, and the files in ``local/`` that a site may change."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from medpfl.core.errors import MedPFLError

DEFAULT_STORAGE = "/tmp/nvflare"  # where FLARE's template lets a server keep its jobs
HOSPITALS = "medpfl_hospitals.json"  # a server's: the names of the hospitals that were provisioned
STORAGE = "storage"  # where we let it: in the kit's own folder
_FILES: dict[str, Literal["server", "hospital", "admin"]] = {
    "fed_server.json": "server",
    "fed_client.json": "hospital",
    "fed_admin.json": "admin",
}


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
    content = read_json(file)
    try:
        if _FILES[found[0]] == "admin":
            admin = content["admin"]
            name, host, port = admin["username"], admin["host"], admin["port"]
            keys, identity = ("client_cert", "client_key", "ca_cert"), admin
        else:
            host, _, port = content["servers"][0]["service"]["target"].rpartition(":")
            identity = content["servers"][0] if _FILES[found[0]] == "server" else content["client"]
            name = identity["admin_server"] if _FILES[found[0]] == "server" else identity["fqsn"].split(".")[-1]
            keys = ("ssl_cert", "ssl_private_key", "ssl_root_cert")
        certificate, key, root = (startup / identity[entry] for entry in keys)
        security = identity.get("connection_security", "mtls")
        return Kit(folder, _FILES[found[0]], name, host, int(port), security, certificate, key, root)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise MedPFLError(f"{file} is not what FLARE 2.9 writes: {type(error).__name__}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        MedPFLError: the file cannot be read or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MedPFLError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise MedPFLError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise MedPFLError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object at once or not at all.

    Raises:
        MedPFLError: it cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=2), encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        raise MedPFLError(f"cannot write {file}: {error.strerror}") from error


def local_json(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """The site's own ``local/<name>`` or, while it has none, FLARE's ``<name>.default``; the file and its content.

    Raises:
        MedPFLError: there is neither, or it cannot be read.
    """
    own = folder / "local" / name
    file = own if own.exists() else own.with_name(f"{name}.default")
    if not file.exists():
        raise MedPFLError(f"{folder} is not a server's or hospital's startup kit: there is no {file}")
    return file, read_json(file)


def write_hospitals(kit: Path, names: Sequence[str]) -> None:
    """Tell a server's kit which hospitals the federation has."""
    write_json(kit / "local" / HOSPITALS, {"hospitals": list(names)})


def hospitals_of(local: Path) -> list[str]:
    """The names that ``write_hospitals`` left in a kit's folder ``local``; none where it did not.

    Raises:
        MedPFLError: the file cannot be read.
    """
    file = local / HOSPITALS
    return [str(name) for name in read_json(file).get("hospitals", [])] if file.exists() else []


def storage_of(resources: dict[str, Any]) -> dict[str, Path]:
    """Where a server keeps its jobs and its snapshots, by a word for it."""
    return {what: Path(place[key]) for what, (place, key) in _storage_places(resources).items()}


def keep_storage(folder: Path, resources: dict[str, Any]) -> None:
    """Let a server keep its jobs in its kit's folder, as it lies now; another place that a person chose is kept."""
    for what, (place, key) in _storage_places(resources).items():
        path = Path(place[key])
        if path.is_relative_to(DEFAULT_STORAGE) or path.parent.name == STORAGE:
            place[key] = str(folder.resolve() / STORAGE / what)


def _storage_places(resources: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    places: dict[str, tuple[dict[str, Any], str]] = {}
    for component in resources.get("components", []):
        if component.get("id") == "job_manager" and "uri_root" in component.get("args", {}):
            places["jobs"] = component["args"], "uri_root"
    storage = resources.get("snapshot_persistor", {}).get("args", {}).get("storage", {}).get("args", {})
    if "root_dir" in storage:
        places["snapshots"] = storage, "root_dir"
    return places
