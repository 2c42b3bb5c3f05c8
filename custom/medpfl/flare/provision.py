# SPDX-License-Identifier: Apache-2.0
"""Startup kits for real sites, made by ``nvflare provision`` from a project file, and prepared for this package."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID
from nvflare.tool.package_checker.check_rule import CHECK_PASSED, CheckRule
from nvflare.tool.package_checker.server_package_checker import ServerPackageChecker
from pydantic import ValidationError

from medpfl.core.errors import ConfigError, MedPFLError, meant
from medpfl.data.untrusted import load_yaml
from medpfl.flare.console import close_console
from medpfl.flare.kit_files import Participant, Project, Resources, Way, local_file, write_file
from medpfl.flare.kits import Kit, keep_storage, read_kit, write_hospitals
from medpfl.results.schema import NO_HOSPITALS

MUTUAL_TLS = "mtls"
_WAYS = ("listening_host", "connect_to")
_ISSUED = "cert.json"


@dataclass(frozen=True)
class Person:
    """Who gets a kit: ``role`` is "server", "hospital", "relay" or one of FLARE's roles for people."""

    kit: Kit
    role: str
    org: str


@dataclass(frozen=True)
class Provisioned:
    """What one provisioning made.

    ``folder`` holds the kits; ``state`` holds the root certificate's private key and never leaves the centre;
    ``first``: whether the root certificate is new; ``moved``: whose kit of the time before looks for the server, or
    listens, at another address than the new one.
    """

    folder: Path
    state: Path
    people: list[Person]
    root: x509.Certificate
    first: bool
    moved: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the root certificate, to be compared over another channel than the kits."""
        return fingerprint(self.root)


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate as pairs of digits."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def read_project(file: Path) -> Project:
    """Read a FLARE project file.

    Raises:
        ConfigError: it is not valid, has not exactly one server, asks for less than mutual TLS, or has a hospital whose
            name every job would refuse.
    """
    try:
        content = load_yaml(file)
    except OSError as error:
        raise ConfigError(f"cannot read the project file {file}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    participants = content.get("participants") if isinstance(content, dict) else None
    if not isinstance(participants, list) or not all(isinstance(entry, dict) for entry in participants):
        raise ConfigError(f"{file}: expected a mapping with a list 'participants' of mappings (see poc/project.yml)")
    try:
        project = Project.model_validate(content)
    except ValidationError as error:
        first, *place = error.errors()[0]["loc"]
        if first != "participants":
            raise ConfigError(f"{file}: '{first}' is missing or no text") from error
        entry, key = participants[int(place[0])], place[1]
        wanted = "is neither a host's name nor a mapping (docs/network.md)" if key in _WAYS else "is missing or no text"
        raise ConfigError(f"{file}: participant {entry.get('name', entry)}: '{key}' {wanted}") from error
    _check_ways(file, project)
    servers = [one for one in project.participants if one.type == "server"]
    if len(servers) != 1:
        raise ConfigError(f"{file}: expected one participant of type 'server', got {len(servers)}")
    for one in project.participants:
        if one.type == "client" and one.name in NO_HOSPITALS:
            said = f"a hospital cannot be called '{one.name}', which is what results call the {one.name} itself"
            raise ConfigError(f"{file}: {said}; give it another name")
    return project


def _check_ways(file: Path, project: Project) -> None:
    """Nobody listens or connects without mutual TLS, and who is behind a relay says so."""
    relays = {one.name: one for one in project.participants if one.type == "relay"}
    parents = {*relays, *(one.name for one in project.participants if one.type == "server")}
    for one in project.participants:
        who, listens, connects = f"{file}: {one.name}:", one.listening_host, one.connect_to
        said: dict[str, str | None] = {"connection_security": one.connection_security}
        if one.type == "relay" and (not isinstance(listens, Way) or not listens.default_host or not listens.port):
            raise ConfigError(f"{who} a relay needs a listening_host with default_host, port and connection_security")
        if listens is not None:  # FLARE lets it listen in the clear where nothing is said
            given = listens.connection_security if isinstance(listens, Way) else None
            said["listening_host.connection_security"] = given
        if isinstance(connects, Way) and connects.connection_security is not None:
            said["connect_to.connection_security"] = connects.connection_security
        for key, value in said.items():
            if value != MUTUAL_TLS:
                got = f"'{value}'" if value else "nothing"
                raise ConfigError(f"{who} {key} must be '{MUTUAL_TLS}', got {got}")
        if isinstance(connects, Way) and connects.name is not None and connects.name not in parents:
            raise ConfigError(
                f"{who} connect_to: there is no server or relay '{connects.name}'{meant(connects.name, parents)}"
            )
        if isinstance(connects, str) and connects in relays:  # FLARE would take it for the name of the server's machine
            raise ConfigError(f"{who} connect_to: to be behind the relay write {{name: {connects}}}, got '{connects}'")


def provision(file: Path, output: Path) -> Provisioned:
    """Make startup kits under ``output``; a repetition keeps the root certificate and makes the next ``prod_NN``.

    Raises:
        ConfigError: the project file is not valid, or gives somebody who has a certificate another organisation or
            role.
        MedPFLError: FLARE could not make the kits.
    """
    project = read_project(file)
    place = output / project.name
    state = place / "state"
    first = not (state / _ISSUED).exists()
    if not first:
        _check_issued(file, project, state / _ISSUED)
    before = set(place.glob("prod_*"))
    try:  # FLARE would speak of a bug of its own
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise MedPFLError(f"cannot write startup kits into {output}: {error.strerror}") from error
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(file), "-w", str(output), "--force"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, umask=0o077)
    made = sorted(set(place.glob("prod_*")) - before)
    if done.returncode or len(made) != 1:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise MedPFLError(f"FLARE could not provision {file}: {' '.join(said[-4:])[-600:]}")
    people = [_person(made[0], entry) for entry in project.participants]
    for person in people:
        if person.kit.role == "server":
            resources = local_file(person.kit.folder, "resources.json", Resources)
            keep_storage(person.kit.folder, resources)
            write_hospitals(person.kit.folder, [other.kit.name for other in people if other.role == "hospital"])
            write_file(person.kit.local / "resources.json", resources)
        elif person.kit.role == "admin":
            close_console(person.kit.folder)
    _private(place)
    root = x509.load_pem_x509_certificate(people[0].kit.root.read_bytes())
    return Provisioned(made[0], state, people, root, first, tuple(_moved(sorted(before), people)))


def _moved(before: Sequence[Path], people: Sequence[Person]) -> Iterator[str]:
    for kit in (person.kit for person in people):
        kept = [folder / kit.name for folder in before if (folder / kit.name).is_dir()]
        try:
            old = read_kit(kept[-1]) if kept else kit
        except MedPFLError:  # it was taken apart
            continue
        if (old.host, old.port, old.listens) != (kit.host, kit.port, kit.listens):
            yield kit.name


def _check_issued(file: Path, project: Project, issued: Path) -> None:
    """Whoever has a certificate gets it again from FLARE, whatever the project says by now, and it alone says what they
    may do."""
    try:
        stored = json.loads(issued.read_text())
        texts = {one.name: stored[one.name]["cert"] for one in project.participants if one.name in stored}
        subjects = {name: x509.load_pem_x509_certificate(text.encode()).subject for name, text in texts.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise MedPFLError(f"{issued}, the state of earlier provisioning, cannot be read: {error}") from error
    for one in project.participants:
        if one.name not in subjects:
            continue
        said = [("org", NameOID.ORGANIZATION_NAME, one.org)]
        if one.type == "admin":
            said.append(("role", NameOID.UNSTRUCTURED_NAME, one.role))
        for key, place, now in said:
            was = [str(entry.value) for entry in subjects[one.name].get_attributes_for_oid(place)]
            if was != [now]:
                raise ConfigError(
                    f"{file}: participant {one.name}: '{key}' is '{now}', and the certificate that was issued says "
                    f"'{', '.join(was)}', which counts and comes again: write that, or give the participant another "
                    "name; for a new certificate of the same name provision into a new folder, and hand out all kits"
                )


def preflight(kit: Kit) -> list[str]:
    """FLARE's own preflight rules for a server on this machine; returns the problems.

    Without FLARE's dry run, which starts the server for three seconds and then kills every process that has this kit's
    command line, a running server included.
    """
    checker = ServerPackageChecker()
    checker.init(str(kit.folder))
    results = {rule.name: rule(str(kit.folder), data=None) for rule in checker.rules if isinstance(rule, CheckRule)}
    return [f"{name}: {found.problem}" for name, found in results.items() if found.problem != CHECK_PASSED]


def _person(folder: Path, entry: Participant) -> Person:
    kit = read_kit(folder / entry.name)
    return Person(kit, entry.role if kit.role == "admin" else kit.role, entry.org)


def _private(folder: Path) -> None:
    """Kits and state hold private keys (the state the root's, too): for their owner only, whatever FLARE wrote."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            os.chmod(path, stat.S_IMODE(path.stat().st_mode) & 0o700)
