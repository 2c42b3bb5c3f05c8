# SPDX-License-Identifier: Apache-2.0
"""What we read of FLARE's own files: startup kits, project files, a job's filters. Entries that are not named here are
none of our affair, and are written back as they were."""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from medpfl.core.errors import MedPFLError

Json = dict[str, JsonValue]


class FlareFile(BaseModel):
    """A mapping of FLARE's; what else it holds is kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    def written(self) -> dict[str, object]:
        """What is to be written: what was there, with our changes."""
        return self.model_dump(exclude_unset=True)


Found = TypeVar("Found", bound=FlareFile)


class Component(FlareFile):
    """An object that FLARE builds."""

    id: str = ""
    path: str = ""
    args: Json = {}


class Components(FlareFile):
    """A file that adds components to those of ``resources.json``."""

    components: list[Component] = []


class Storage(FlareFile):
    args: Json = {}


class PersistorArguments(FlareFile):
    storage: Storage = Storage()


class Persistor(FlareFile):
    args: PersistorArguments = PersistorArguments()


class Resources(FlareFile):
    """``local/resources.json`` of a server or a hospital."""

    components: list[Component] = []
    class_allow_list: list[str] = []
    class_list_enforcement_mode: str = "enforce"
    allow_log_streaming: bool = True
    snapshot_persistor: Persistor = Persistor()


class Authorization(FlareFile):
    """``local/authorization.json``: role to its rights, one word for all of them or one each."""

    permissions: dict[str, str | dict[str, JsonValue]] = {}


class Scope(FlareFile):
    name: str | None = None
    properties: Json = {}


class Privacy(FlareFile):
    """``local/privacy.json``."""

    default_scope: str | None = None
    scopes: list[Scope] = []


class Identity(FlareFile):
    """Files of a kit's identity, and how it connects."""

    ssl_cert: str
    ssl_private_key: str
    ssl_root_cert: str
    connection_security: str = "mtls"


class Service(FlareFile):
    target: str


class Target(FlareFile):
    """A server as hospitals know it."""

    service: Service


class Client(Identity):
    fqsn: str


class Server(Identity):
    service: Service
    admin_server: str


class ServerStartup(FlareFile):
    """``startup/fed_server.json``."""

    servers: list[Server] = Field(min_length=1)


class ClientStartup(FlareFile):
    """``startup/fed_client.json``."""

    servers: list[Target] = Field(min_length=1)
    client: Client


class Parent(FlareFile):
    """What a relay connects to, or a hospital that is behind one. FLARE writes "None" where the project file is silent,
    and takes mutual TLS then."""

    identity: str
    address: str
    connection_security: str = "mtls"

    @property
    def security(self) -> str:
        """FLARE's word for it."""
        return "mtls" if self.connection_security == "None" else self.connection_security


class RelayStartup(FlareFile):
    """``startup/fed_relay.json``."""

    identity: str
    connect_to: Parent


class Listening(FlareFile):
    """Where a relay takes connections; FLARE listens in the clear where nothing is said."""

    port: int
    connection_security: str = "clear"


class Internal(FlareFile):
    resources: Listening


class Communication(FlareFile):
    """``local/comm_config.json`` of a relay."""

    internal: Internal


class Relayed(FlareFile):
    """``local/relay__resources.json`` of a hospital that is behind a relay."""

    relay_config: Parent


class Admin(FlareFile):
    username: str
    host: str
    port: int | str
    client_cert: str
    client_key: str
    ca_cert: str
    connection_security: str = "mtls"


class AdminStartup(FlareFile):
    """``startup/fed_admin.json``."""

    admin: Admin


class FilterEntry(FlareFile):
    """Filters of some tasks of a job."""

    tasks: list[str] = []
    direction: str | None = None
    filters: list[Component] = []


class ClientJob(FlareFile):
    """A job's ``config_fed_client.json``."""

    task_result_filters: list[FilterEntry] = []


class Way(FlareFile):
    """Where a participant listens or connects to, beside the server's own address."""

    name: str | None = None
    default_host: str | None = None
    host: str | None = None
    port: int | None = None
    connection_security: str | None = None


class Participant(FlareFile):
    name: str
    type: str
    org: str
    role: str = ""
    connection_security: str = "mtls"
    listening_host: Way | str | None = None
    connect_to: Way | str | None = None


class Project(FlareFile):
    """A project file of ``nvflare provision``."""

    name: str
    participants: list[Participant]


def read_file(file: Path, kind: type[Found]) -> Found:
    """A JSON file of FLARE's.

    Raises:
        MedPFLError: the file cannot be read, or it is not what FLARE 2.9 writes.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise MedPFLError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise MedPFLError(f"{file} is not valid JSON: {error}") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "json_invalid":
            raise MedPFLError(f"{file} is not valid JSON: {problem['ctx']['error']}") from error
        if not problem["loc"]:
            raise MedPFLError(f"{file}: expected a JSON object, got {type(problem['input']).__name__}") from error
        place = ".".join(map(str, problem["loc"]))
        raise MedPFLError(f"{file} is not what FLARE 2.9 writes: '{place}': {problem['msg'].lower()}") from error


def write_file(file: Path, content: FlareFile) -> None:
    """Write a JSON object at once or not at all.

    Raises:
        MedPFLError: it cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(content.model_dump_json(exclude_unset=True, indent=2), encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        raise MedPFLError(f"cannot write {file}: {error.strerror}") from error


def check_entered(folder: Path) -> None:
    """A kit is its owner's alone, and ``Path.exists`` raises where it may not look.

    Raises:
        MedPFLError: this account may not look into the kit.
    """
    for place in (folder, folder / "startup", folder / "local"):
        try:
            os.listdir(place)
        except PermissionError as error:
            raise MedPFLError(f"this account may not read {place}: use the account that the kit belongs to") from error
        except OSError:  # said where it is missed
            continue


def local_file(folder: Path, name: str, kind: type[Found]) -> Found:
    """The site's own ``local/<name>`` or, while it has none, FLARE's ``<name>.default``.

    Raises:
        MedPFLError: there is neither, or it cannot be read.
    """
    check_entered(folder)
    own = folder / "local" / name
    file = own if own.exists() else own.with_name(f"{name}.default")
    if not file.exists():
        raise MedPFLError(f"{folder} is not a server's or hospital's startup kit: there is no {file}")
    return read_file(file, kind)
