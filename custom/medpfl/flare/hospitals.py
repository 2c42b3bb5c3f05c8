# SPDX-License-Identifier: Apache-2.0
"""A federation of provisioned hospitals on one machine: real startup kits, mutual TLS, each hospital its own folder."""

import contextlib
import io
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from nvflare.fuel.flare_api.api_spec import JobNotDone, JobNotRunning

from medpfl.core.errors import ConfigError, meant
from medpfl.data.paths import map_paths, split_pattern
from medpfl.data.site_file import ENVIRONMENT_VARIABLE
from medpfl.flare.allow import allow, forbid_code
from medpfl.flare.federation import LOST, LocalFederation, usable_port
from medpfl.flare.kit_files import Participant, Project, Way
from medpfl.flare.provision import provision, read_project

STOP_TIMEOUT = 40  # seconds that an abort or FLARE's shutdown may take; its daemons look every 5 seconds
_REFUSALS = (*LOST, JobNotRunning, JobNotDone)  # then signals do it
_RESTARTED = "start fl because process of"  # a daemon says this when what it started has ended


class HospitalFederation(LocalFederation):
    """Kits handed out, each to a folder of its own, and started as a hospital starts them: by their ``start.sh``.

    In ``workspace`` every participant has a folder: ``server/kit``, ``hospital-a/{kit,data,home}``, ``NAME/kit``; the
    kits' makings, with the root certificate's key, are in ``centre``.

    Args:
        project: FLARE project file. On one machine its port is replaced by a free one, its server is looked for on this
            machine, and its hospitals are those of ``site_files``.
        site_files: folder with ``<hospital>.yaml`` and data for every hospital.
        sites, port, classes, workspace: see ``LocalFederation``.
        allow_code: hospitals that accept code inside jobs; all others refuse it.
        copy_data: give every hospital a copy of its data in its folder; else they stay where the site files have them.
    """

    def __init__(
        self,
        project: Path,
        site_files: Path,
        sites: list[str],
        port: int | None = None,
        classes: Sequence[str] = (),
        workspace: Path | None = None,
        allow_code: Sequence[str] = (),
        copy_data: bool = True,
    ):
        self.project = localised(read_project(project), sites, 0)
        self.server = _only(self.project, "server", None)
        self.lead, self.admin = _only(self.project, "admin", "lead"), _only(self.project, "admin", "project_admin")
        super().__init__(sites, port, classes, workspace)
        self.site_files, self.allow_code, self.copy_data = site_files.resolve(), allow_code, copy_data

    @property
    def submitter(self) -> str:
        return self.lead

    def kit(self, name: str) -> Path:
        return self.workspace / name / "kit"

    def console_command(self) -> str:
        return f"{super().console_command()}   # it asks for a user name: {self.lead}"

    def _command(self, name: str) -> list[str]:
        return ["bash", str(self.kit(name) / "startup" / "start.sh")]

    def _environment(self, name: str) -> dict[str, str]:
        own = self._own_home(self.workspace / name / "home")
        own.pop(ENVIRONMENT_VARIABLE, None)  # each hospital's site file is in its own kit
        return own

    def _failed_to_start(self) -> bool:
        consoles = [self._console(name) for name in ("server", *self.relays, *self.sites)]
        return any(_RESTARTED in text.read_text(errors="replace") for text in consoles if text.exists())

    def _provision(self) -> None:
        centre = self.workspace / "centre"
        centre.mkdir()
        file = centre / "project.yml"
        file.write_text(yaml.safe_dump(self._localised().written(), sort_keys=False))
        for person in provision(file, centre / "kits").people:
            name = "server" if person.role == "server" else person.kit.name
            shutil.copytree(person.kit.folder, self.kit(name))
            if person.role == "relay" and person.kit.listens is not None:
                self.relays[name] = person.kit.listens
        for name in ("server", *self.sites):
            allow(self.kit(name), self.classes)
        for site in self.sites:
            data = self.workspace / site / "data" if self.copy_data else None
            settle(self.site_files, site, data, self.kit(site) / "local")
            if site not in self.allow_code:
                forbid_code(self.kit(site))

    def _localised(self) -> Project:
        return localised(self.project, self.sites, self.port)

    def _shut_down(self) -> None:
        """FLARE's own way: abort what runs, then let the project admin shut everything down."""
        if self._session is None:
            return
        with contextlib.suppress(*_REFUSALS), contextlib.redirect_stdout(io.StringIO()):
            self.log_in(self.admin)
            session = self.session
            unfinished = [job["job_id"] for job in session.list_jobs() if not job["status"].startswith("FINISHED")]
            for job_id in unfinished:
                session.abort_job(job_id)
            _wait_until(lambda: all(self.status(job_id).startswith("FINISHED") for job_id in unfinished))
            session.shutdown("all", wait=False)
            _wait_until(lambda: not self._members())


def check_named(project: Path, sites: Sequence[str]) -> None:
    """A project that somebody wrote has these hospitals; else they would be connected in another way than it says.

    Raises:
        ConfigError: it cannot be read, or one is missing.
    """
    named = [one.name for one in read_project(project).participants if one.type == "client"]
    for site in sites:
        if site not in named:
            raise ConfigError(f"{project} has no hospital '{site}'{meant(site, named)}; it has: {', '.join(named)}")


def localised(project: Project, sites: list[str], port: int) -> Project:
    """The project on one machine: this port, a server that is looked for at localhost, relays at free ports of it, and
    these hospitals."""
    here = {"fed_learn_port": port, "admin_port": port, "default_host": "localhost"}
    kept: list[Participant] = []
    clients: dict[str, Participant] = {}
    for one in project.participants:
        if isinstance(one.connect_to, Way):  # wherever that may be in reality
            one = one.model_copy(update={"connect_to": one.connect_to.model_copy(update={"host": None, "port": None})})
        if one.type == "client":
            clients[one.name] = one
        elif one.type == "relay" and isinstance(one.listening_host, Way):
            way = {"default_host": "localhost", "port": usable_port(None)}
            kept.append(one.model_copy(update={"listening_host": one.listening_host.model_copy(update=way)}))
        else:
            kept.append(one.model_copy(update=here if one.type == "server" else {}))
    new = [clients.get(site, Participant(name=site, type="client", org=site.replace("-", "_"))) for site in sites]
    return project.model_copy(update={"participants": [*kept, *new]})


def settle(site_files: Path, site: str, data: Path | None, local: Path) -> Path:
    """Give a hospital's kit the site file that declares its data.

    Args:
        site_files: folder with ``<site>.yaml``.
        data: folder to copy the declared data into, so that the hospital has its own; None: they stay where they are.
        local: the kit's ``local`` folder.

    Returns:
        The site file in the kit.
    """
    site_files = site_files.resolve()
    content = yaml.safe_load((site_files / f"{site}.yaml").read_text(encoding="utf-8"))

    def own(text: str) -> str:
        fixed, pattern = split_pattern(text)
        source = (site_files / fixed).resolve()
        if not source.exists():
            return text  # the data check says what is missing, in words of the hospital's own
        place = source if data is None else _copied(source, site_files, data)
        return str(place / pattern) if pattern else str(place)

    file = local / f"{site}.yaml"
    content["datasets"] = map_paths(content["datasets"], own)
    if "checkpoints" in content:
        content["checkpoints"] = {name: own(text) for name, text in content["checkpoints"].items()}
    if "keys" in content:  # it is its owner's alone, and stays where it is
        content["keys"] = str(site_files / content["keys"])
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def _copied(source: Path, site_files: Path, data: Path) -> Path:
    """Where ``source`` lies in ``data``, once it is copied there with what it may refer to."""
    whole = source
    if source.is_relative_to(site_files) and source != site_files:
        whole = site_files / source.relative_to(site_files).parts[0]
    data.mkdir(parents=True, exist_ok=True)
    target = data / whole.name
    if whole.is_dir():
        shutil.copytree(whole, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(whole, target)
    return (data / source.relative_to(whole.parent)).resolve()


def _only(project: Project, kind: str, role: str | None) -> str:
    for one in project.participants:
        if one.type == kind and (role is None or one.role == role):
            return one.name
    raise ConfigError(f"the project has no participant of type '{kind}' and role '{role}', which a federation needs")


def _wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.2)
