# SPDX-License-Identifier: Apache-2.0
"""What the three JSON files of a job say, each as one typed object; no class that they name is imported yet."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from medpfl.core.errors import ConfigError, shown
from medpfl.job.codecs import TASKS
from medpfl.job.files import Object, list_of, object_of
from medpfl.job.names import (
    CLIENT_FILE,
    CONTROLLER,
    DECODE,
    ENCODE,
    EVALUATION_CONTROLLER,
    EXECUTOR,
    SERVER_FILE,
)

LAUNCHER = "launcher_spec"
"""meta.json: what FLARE's launchers at the sites that have one (Docker, Kubernetes, Slurm) are told of this job."""
_DOCKER = {"image", "python_path", "entrypoint", "num_of_gpus", "shm_size"}  # what FLARE lets a job say
FILTERS = ("task_data_filters", "task_result_filters")


@dataclass(frozen=True)
class CodecFilter:
    """``codec``: the codec's configuration, as it stands in the file; None: this filter encodes nothing."""

    codec: JsonValue


@dataclass(frozen=True)
class Meta:
    """meta.json."""

    name: str
    min_clients: int


@dataclass(frozen=True)
class Server:
    """config_fed_server.json.

    Attributes:
        controller: its class, and ``args``: its arguments.
        components: slot to its component's configuration.
        trackers: their configurations.
        filters: "task_data_filters" and "task_result_filters" to the codec filter among them.
        others: the classes of all other filters.
    """

    controller: str
    args: JsonValue
    components: Mapping[str, Object]
    trackers: tuple[JsonValue, ...]
    filters: Mapping[str, CodecFilter]
    others: Sequence[JsonValue]


@dataclass(frozen=True)
class Client:
    """config_fed_client.json: the executor's arguments; ``filters`` and ``others`` as in ``Server``, but for those of
    the others that act on a hospital's answers on their way out alone: ``leaving``."""

    method: JsonValue
    task: JsonValue
    filters: Mapping[str, CodecFilter]
    others: Sequence[JsonValue]
    leaving: Sequence[JsonValue]


def name_of(name: object, where: str = "meta.json: 'name'") -> str:
    """A job's name, which becomes that of a folder at every site.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{where} must be letters, digits, '.', '_' or '-', got {shown(name)}")
    return name


def meta_of(content: Object) -> Meta:
    """Of meta.json's content.

    Raises:
        ConfigError: with the key, expected and got.
    """
    where = "meta.json"
    keys = {"name", "resource_spec", "min_clients", "mandatory_clients", "deploy_map", "scope", LAUNCHER}
    object_of(content, where, keys)
    _launched(content.get(LAUNCHER, {}), f"{where}: {LAUNCHER}")
    name = name_of(content.get("name"))
    if "min_clients" not in content:
        raise ConfigError(
            f"{where}: 'min_clients' is missing; expected the number of hospitals without whom no round counts"
        )
    min_clients = content["min_clients"]
    if not isinstance(min_clients, int) or isinstance(min_clients, bool) or min_clients < 1:
        raise ConfigError(f"{where}: 'min_clients' must be a whole number above 0, got {min_clients!r}")
    deployed = content.get("deploy_map")
    if not isinstance(deployed, dict) or not deployed:
        raise ConfigError(f'{where}: \'deploy_map\' is missing or empty; expected {{"app": ["@ALL"]}}')
    if "app" not in deployed:  # FLARE would look for another folder than is read here
        raise ConfigError(f"{where}: 'deploy_map' must name the folder 'app', got {', '.join(deployed)}")
    must = content.get("mandatory_clients", [])
    if not isinstance(must, list) or not all(isinstance(site, str) for site in must):
        raise ConfigError(f"{where}: 'mandatory_clients' must be a list of hospitals' names, got {must!r}")
    _check_sites([site for app, given in deployed.items() for site in _sites(app, given)], min_clients, must)
    spec = content.get("resource_spec", {})
    if not isinstance(spec, dict) or not all(isinstance(options, dict) for options in spec.values()):
        raise ConfigError(f"{where}: 'resource_spec' must be a JSON object, site to its own object, got {spec!r}")
    return Meta(name, min_clients)


def _sites(app: str, given: JsonValue) -> list[str]:
    """The sites that an app goes to, in any of the forms that FLARE takes."""
    listed = given.get("targets", given.get("sites")) if isinstance(given, dict) else given
    found: list[JsonValue] = []
    for one in listed if isinstance(listed, list) else [listed]:
        inner = one.get("sites", one.get("targets")) if isinstance(one, dict) else [one]
        found += inner if isinstance(inner, list) else [inner]
    names = [site for site in found if isinstance(site, str)]
    if not names or len(names) < len(found):
        raise ConfigError(
            f'meta.json: \'deploy_map\': \'{app}\' must list sites, as ["@ALL"] or ["server", "hospital-a"], '
            f"got {given!r}"
        )
    return names


def _check_sites(sites: list[str], min_clients: int, must: Sequence[JsonValue]) -> None:
    """Raises ConfigError for sites of all apps together that FLARE would refuse when the job is submitted."""
    where = "meta.json: 'deploy_map'"
    if "@all" in map(str.casefold, sites):
        if len(sites) > 1:
            raise ConfigError(f"{where}: '@ALL' stands for every site, so no other can be named; got {sites!r}")
        return
    if "server" not in sites:
        raise ConfigError(f"{where}: the site 'server' is missing, without which no job runs; got {sites!r}")
    if twice := [site for site in sites if sites.count(site) > 1]:
        raise ConfigError(f"{where}: '{twice[0]}' is named twice; a site gets one app")
    if min_clients > len(sites) - 1:
        raise ConfigError(f"{where} names {len(sites) - 1} hospitals, and 'min_clients' is {min_clients}")
    if missing := [site for site in must if site not in sites]:
        raise ConfigError(f"{where} does not name '{missing[0]}', which is among 'mandatory_clients'")


def _check_version(content: Object, where: str) -> None:
    """Raises ConfigError for a file that FLARE would not read, once the job has begun."""
    version = content.get("format_version")
    if type(version) is not int or version != 2:
        got = repr(version) if "format_version" in content else "none"
        raise ConfigError(f"{where}: 'format_version' must be 2, or FLARE does not read the file; got {got}")


def _launched(spec: JsonValue, where: str) -> None:
    """Raises ConfigError unless it is FLARE's: site (or "default") to a launcher's kind to that launcher's options."""
    if not isinstance(spec, dict):
        raise ConfigError(f"{where}: expected a JSON object, site or 'default' to launchers, got {spec!r}")
    for site, launchers in spec.items():
        for kind, options in object_of(launchers, f"{where}: {site}", {"process", "docker", "k8s", "slurm"}).items():
            place = f"{where}: {site}: {kind}"
            if kind == "docker":
                object_of(options, place, _DOCKER)
            elif not isinstance(options, dict):
                raise ConfigError(f"{place}: expected a JSON object, got {options!r}")


def server_of(content: Object) -> Server:
    """Of config_fed_server.json's content; raises as ``meta_of``."""
    where = SERVER_FILE
    object_of(content, where, {"format_version", "server", "workflows", "components", "trackers", *FILTERS})
    _check_version(content, where)
    server = object_of(content.get("server", {}), f"{where}: server", {"heart_beat_timeout", "task_request_interval"})
    interval = server.get("task_request_interval")
    if not isinstance(interval, (int, float)) or isinstance(interval, bool) or not 0 < interval <= 10:
        raise ConfigError(
            f"{where}: server.task_request_interval must be above 0 and at most 10 seconds (0.1 is good; with FLARE's "
            f"own 2 seconds a job starts and ends later), got {interval!r}"
        )
    patience = server.get("heart_beat_timeout", 600)
    if not isinstance(patience, (int, float)) or isinstance(patience, bool) or not patience > 0:
        raise ConfigError(f"{where}: server.heart_beat_timeout must be above 0 seconds, got {patience!r}")
    workflows = content.get("workflows")
    if not isinstance(workflows, list) or len(workflows) != 1:
        raise ConfigError(f"{where}: 'workflows' must hold one entry with path {CONTROLLER}")
    workflow = object_of(workflows[0], f"{where}: workflows[0]", {"id", "path", "args"})
    if not isinstance(workflow.get("id", ""), str):
        raise ConfigError(f"{where}: workflows[0].id must be a text, got {workflow['id']!r}")
    path = workflow.get("path")
    if not isinstance(path, str) or path not in (CONTROLLER, EVALUATION_CONTROLLER):
        raise ConfigError(f"{where}: workflows[0].path must be {CONTROLLER} or {EVALUATION_CONTROLLER}, got {path!r}")
    filters, trackers = _filters(content, where, (ENCODE, DECODE)), tuple(list_of(content, "trackers", where))
    others, leaving = _others(content, where)
    others = [*others, *leaving]
    return Server(path, workflow.get("args", {}), _components(content, where), trackers, filters, others)


def _components(content: Object, where: str) -> dict[str, Object]:
    declared: dict[str, Object] = {}
    for entry in list_of(content, "components", where):
        if not isinstance(entry, dict) or not isinstance(slot := entry.get("id"), str):
            raise ConfigError(f"{where}: a component needs an 'id', got {entry!r}")
        if slot in declared:
            raise ConfigError(f"{where}: two components have the id '{slot}'")
        declared[slot] = entry
    return declared


def client_of(content: Object) -> Client:
    """Of config_fed_client.json's content; raises as ``meta_of``."""
    where = CLIENT_FILE
    object_of(content, where, {"format_version", "executors", "components", *FILTERS})
    _check_version(content, where)
    if list_of(content, "components", where):
        raise ConfigError(f"{where}: 'components' must be empty; a hospital builds the executor and nothing else")
    executors = content.get("executors")
    if not isinstance(executors, list) or len(executors) != 1:
        raise ConfigError(f"{where}: 'executors' must hold one entry")
    entry = object_of(executors[0], f"{where}: executors[0]", {"tasks", "executor"})
    if entry.get("tasks") != ["*"]:
        raise ConfigError(f'{where}: executors[0].tasks must be ["*"], got {entry.get("tasks")!r}')
    executor = object_of(entry.get("executor"), f"{where}: executor", {"path", "args"})
    if executor.get("path") != EXECUTOR:
        raise ConfigError(f"{where}: the executor's path must be {EXECUTOR}, got {executor.get('path')!r}")
    args = object_of(executor.get("args", {}), f"{where}: executor.args", {"method", "task"})
    for key in ("method", "task"):
        if key not in args:
            raise ConfigError(f"{where}: the executor's argument '{key}' is missing")
    filters = _filters(content, where, (DECODE, ENCODE))
    return Client(args["method"], args["task"], filters, *_others(content, where))


def _filters(content: Object, where: str, paths: tuple[str, str]) -> dict[str, CodecFilter]:
    """The codec filters of one file, whose classes at this end are ``paths``."""
    found: dict[str, CodecFilter] = {}
    for key, path in zip(FILTERS, paths, strict=True):
        for entry in list_of(content, key, where):
            listed = object_of(entry, f"{where}: {key}", {"tasks", "filters", "direction"})
            for one in list_of(listed, "filters", f"{where}: {key}"):
                if not isinstance(one, dict) or one.get("path") not in (ENCODE, DECODE):
                    continue
                if key in found:
                    raise ConfigError(f"{_place(where, key, one)} is there twice")
                found[key] = _codec_filter(one, listed, path, _place(where, key, one))
    return found


def _others(content: Object, where: str) -> tuple[list[JsonValue], list[JsonValue]]:
    """The classes of the filters that are no codec's, and apart those of results on their way out."""
    others: list[JsonValue] = []
    leaving: list[JsonValue] = []
    for key in FILTERS:
        for entry in list_of(content, key, where):
            listed = object_of(entry, where, {"tasks", "filters", "direction"})
            goes_out = key == "task_result_filters" and listed.get("direction", "out") == "out"
            for one in list_of(listed, "filters", f"{where}: {key}"):
                path = one.get("path") if isinstance(one, dict) else None
                if path not in (ENCODE, DECODE):
                    (leaving if goes_out else others).append(path)
    return others, leaving


def _place(where: str, key: str, one: Object) -> str:
    return f"{where}: {key}: {str(one['path']).rpartition('.')[2]}"


def _codec_filter(one: Object, listed: Object, path: str, place: str) -> CodecFilter:
    if one["path"] != path:
        raise ConfigError(f"{place} does not belong here; {path} does")
    if listed.get("tasks") != list(TASKS) or "direction" in listed:
        raise ConfigError(
            f"{place}: its 'tasks' must be {json.dumps(TASKS)}, without a 'direction'; got {listed.get('tasks')!r}"
        )
    object_of(one, place, {"path", "args"})
    args = object_of(one.get("args", {}), f"{place}: args", {"codec"} if path == ENCODE else set())
    return CodecFilter(args.get("codec"))
