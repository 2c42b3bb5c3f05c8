# SPDX-License-Identifier: Apache-2.0
"""Read and check a job folder (meta.json, app/config/*.json) without nvflare."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medpfl.component import build, class_paths, construct, spec_of
from medpfl.core.codecs import Codec
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.mixers import Mixer
from medpfl.deployed.model_file import load_deployed
from medpfl.methods.base import Method
from medpfl.methods.components import mixers_of
from medpfl.rounds.coding import TASKS, Codecs
from medpfl.rounds.evaluation import MODEL_FILE, check_no_history, check_recipe
from medpfl.rounds.settings import EvaluationSettings, Settings
from medpfl.tasks.base import Task

CONTROLLER = "medpfl.flare.controller.MixingController"
EVALUATION_CONTROLLER = "medpfl.flare.evaluation.EvaluationController"
SERVER_FILE, CLIENT_FILE = "config_fed_server.json", "config_fed_client.json"
EXECUTOR = "medpfl.flare.executor.SiteExecutor"
ENCODE = "medpfl.flare.filters.EncodeUpdate"
DECODE = "medpfl.flare.filters.DecodeUpdate"


@dataclass(frozen=True)
class Job:
    """A job as its JSON files declare it, with its components built.

    Attributes:
        components: slot to the server component that the job names in place of the usual one.
        mixers: slot to the component that mixes it, for every slot, the references' first.
    """

    name: str
    min_clients: int
    settings: Settings
    components: dict[str, Mixer] = field(compare=False)
    method: Method
    task: Task
    codecs: Codecs | None = None
    mixers: dict[str, Mixer] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixers", mixers_of(self.method, self.settings.references, self.components))


@dataclass(frozen=True)
class EvaluationJob:
    """A job that evaluates a given model; ``model`` is its file in the job folder."""

    name: str
    min_clients: int
    settings: EvaluationSettings
    method: Method
    task: Task
    model: Path


def load_job(folder: Path) -> Job | EvaluationJob:
    """Read a job folder and check everything that can be checked without data.

    Raises:
        ConfigError: one sentence with the file, the key, expected and got.
        MedPFLError: the given model of an evaluation job is broken.
    """
    _no_links(folder)
    meta = _json(folder / "meta.json")
    return load_config(folder / "app" / "config", *_check_meta(meta))


def load_config(
    config: Path, name: str, min_clients: int, allow: Callable[[str], None] = lambda path: None
) -> Job | EvaluationJob:
    """The job of a folder with the two configurations: what ``load_job`` reads, and what FLARE deploys to the server.

    Args:
        allow: told every class that the configurations name, before one is imported; raises for what may not be built.

    Raises:
        ConfigError: as ``load_job``.
    """
    server, client = _json(config / SERVER_FILE), _json(config / CLIENT_FILE)
    for path in class_paths([server, client]):
        allow(path)
    path, args = _check_server(server)
    method, task = _check_client(client)
    where = SERVER_FILE
    if path == EVALUATION_CONTROLLER:
        if _list(server, "components", where):
            raise ConfigError(f"{where}: 'components' must be empty: a job that evaluates mixes nothing")
        evaluation = construct(EvaluationSettings, args, f"{where}: controller")
        model = config / MODEL_FILE
        given = load_deployed(model).meta
        check_no_history(given)
        check_recipe(given.recipe, method, task)
        if _codecs(server, client):
            raise ConfigError(f"{where}: a job that evaluates takes no codec filters")
        return EvaluationJob(name, min_clients, evaluation, method, task, model)
    settings = construct(Settings, args, f"{where}: controller")
    components, codecs = _components(server), _codecs(server, client)
    try:
        return Job(name, min_clients, settings, components, method, task, codecs)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def write_job(job: Job, folder: Path) -> Path:
    """The job folder that ``load_job`` reads back as ``job``; a folder that exists is written over.

    Components that equal the method's own are left out.

    Raises:
        MedPFLError: it cannot be written.
    """
    usual = job.method.components()
    named = {slot: mixer for slot, mixer in job.components.items() if mixer != usual.get(slot)}
    controller = {"id": "controller", "path": CONTROLLER, "args": vars(job.settings)}
    executor = {"path": EXECUTOR, "args": {"method": spec_of(job.method), "task": spec_of(job.task)}}
    filters: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if job.codecs:
        filters = (
            _filter_entries(_encoder(job.codecs.to_site), {"path": DECODE}),
            _filter_entries({"path": DECODE}, _encoder(job.codecs.from_site)),
        )
    files = {
        "meta.json": {
            "name": job.name,
            "min_clients": job.min_clients,
            "resource_spec": {},
            "deploy_map": {"app": ["@ALL"]},
        },
        f"app/config/{SERVER_FILE}": {
            "format_version": 2,
            "server": {"heart_beat_timeout": 600, "task_request_interval": 0.1},
            "workflows": [controller],
            "components": [{"id": slot, **spec_of(mixer)} for slot, mixer in named.items()],
            **filters[0],
        },
        f"app/config/{CLIENT_FILE}": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [],
            **filters[1],
        },
    }
    try:
        (folder / "app" / "config").mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def _check_meta(meta: dict[str, Any]) -> tuple[str, int]:
    """The job's name and how many hospitals it needs."""
    where = "meta.json"
    _known_keys(meta, where, {"name", "resource_spec", "min_clients", "mandatory_clients", "deploy_map", "scope"})
    name = meta.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{where}: 'name' must be letters, digits, '.', '_' or '-', got {name!r}")
    min_clients = meta.get("min_clients")
    if type(min_clients) is not int or min_clients < 1:
        raise ConfigError(f"{where}: 'min_clients' must be a whole number above 0, got {min_clients!r}")
    if not isinstance(meta.get("deploy_map"), dict) or not meta["deploy_map"]:
        raise ConfigError(f'{where}: \'deploy_map\' is missing or empty; expected {{"app": ["@ALL"]}}')
    return name, min_clients


def _check_server(server: dict[str, Any]) -> tuple[str, Any]:
    """The controller's class and arguments."""
    where = SERVER_FILE
    _known_keys(server, where, {"format_version", "server", "workflows", "components", *_FILTERS})
    _known_keys(server.get("server", {}), f"{where}: server", {"heart_beat_timeout", "task_request_interval"})
    interval = server.get("server", {}).get("task_request_interval")
    if type(interval) not in (int, float) or not 0 < interval <= 10:
        raise ConfigError(
            f"{where}: server.task_request_interval must be above 0 and at most 10 seconds (0.1 is good; FLARE's own "
            f"default makes every round wait 2 s), got {interval!r}"
        )
    workflows = server.get("workflows")
    if not isinstance(workflows, list) or len(workflows) != 1:
        raise ConfigError(f"{where}: 'workflows' must hold one entry with path {CONTROLLER}")
    _known_keys(workflows[0], f"{where}: workflows[0]", {"id", "path", "args"})
    path = workflows[0].get("path")
    if path not in (CONTROLLER, EVALUATION_CONTROLLER):
        raise ConfigError(f"{where}: workflows[0].path must be {CONTROLLER} or {EVALUATION_CONTROLLER}, got {path!r}")
    return path, workflows[0].get("args", {})


def _components(server: dict[str, Any]) -> dict[str, Mixer]:
    """Slot to the server component that the job names for it."""
    where = SERVER_FILE
    declared: dict[str, Mixer] = {}
    for entry in _list(server, "components", where):
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise ConfigError(f"{where}: a component needs an 'id', got {entry!r}")
        if entry["id"] in declared:
            raise ConfigError(f"{where}: two components have the id '{entry['id']}'")
        declared[entry["id"]] = build(entry, Mixer, f"{where}: component '{entry['id']}'")
    return declared


def _check_client(client: dict[str, Any]) -> tuple[Method, Task]:
    where = CLIENT_FILE
    _known_keys(client, where, {"format_version", "executors", "components", *_FILTERS})
    if _list(client, "components", where):
        raise ConfigError(f"{where}: 'components' must be empty; a hospital builds the executor and nothing else")
    executors = client.get("executors")
    if not isinstance(executors, list) or len(executors) != 1:
        raise ConfigError(f"{where}: 'executors' must hold one entry")
    _known_keys(executors[0], f"{where}: executors[0]", {"tasks", "executor"})
    if executors[0].get("tasks") != ["*"]:
        raise ConfigError(f'{where}: executors[0].tasks must be ["*"], got {executors[0].get("tasks")!r}')
    executor = executors[0].get("executor")
    _known_keys(executor, f"{where}: executor", {"path", "args"})
    if executor.get("path") != EXECUTOR:
        raise ConfigError(f"{where}: the executor's path must be {EXECUTOR}, got {executor.get('path')!r}")
    args = executor.get("args", {})
    _known_keys(args, f"{where}: executor.args", {"method", "task"})
    for key in ("method", "task"):
        if key not in args:
            raise ConfigError(f"{where}: the executor's argument '{key}' is missing")
    return build(args["method"], Method, f"{where}: method"), build(args["task"], Task, f"{where}: task")


_FILTERS = ("task_data_filters", "task_result_filters")


def _encoder(codec: Codec | None) -> dict[str, Any]:
    return {"path": ENCODE, "args": {"codec": spec_of(codec)} if codec else {}}


def _filter_entries(data: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The filters of one end, on what comes from the server (data) and what goes to it (result)."""
    return {key: [{"tasks": list(TASKS), "filters": [one]}] for key, one in zip(_FILTERS, (data, result), strict=True)}


def _codecs(server: dict[str, Any], client: dict[str, Any]) -> Codecs | None:
    """What the codec filters say; None if the job has none. Other filters are FLARE's own affair."""
    found: dict[str, Codec | None] = {}
    for content, where, paths in (
        (server, SERVER_FILE, (ENCODE, DECODE)),
        (client, CLIENT_FILE, (DECODE, ENCODE)),
    ):
        for key, path in zip(_FILTERS, paths, strict=True):
            for entry in _list(content, key, where):
                _known_keys(entry, f"{where}: {key}", {"tasks", "filters", "direction"})
                for one in _list(entry, "filters", f"{where}: {key}"):
                    if not isinstance(one, dict) or one.get("path") not in (ENCODE, DECODE):
                        continue
                    place = f"{where}: {key}: {one['path'].rpartition('.')[2]}"
                    if one["path"] != path:
                        raise ConfigError(f"{place} does not belong here; {path} does")
                    if entry.get("tasks") != list(TASKS) or "direction" in entry:
                        raise ConfigError(
                            f"{place}: its 'tasks' must be {json.dumps(TASKS)}, without a 'direction'; got "
                            f"{entry.get('tasks')!r}"
                        )
                    _known_keys(one, place, {"path", "args"})
                    _known_keys(one.get("args", {}), f"{place}: args", {"codec"} if path == ENCODE else set())
                    given = one.get("args", {}).get("codec")
                    if f"{where}: {key}" in found:
                        raise ConfigError(f"{place} is there twice")
                    found[f"{where}: {key}"] = build(given, Codec, f"{place}: codec") if given is not None else None
    wanted = [f"{where}: {key}" for where in (SERVER_FILE, CLIENT_FILE) for key in _FILTERS]
    if not found:
        return None
    for place in wanted:
        if place not in found:
            raise ConfigError(f"{place}: no codec filter here, but at the other places; a job has all four or none")
    return Codecs(to_site=found[wanted[0]], from_site=found[wanted[3]])


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    _no_paths(content, path.name)
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key '{key}' is there twice")
    return dict(pairs)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _list(content: dict[str, Any], key: str, where: str) -> list[Any]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{where}: '{key}' must be a list, got {value!r}")
    return value


def _known_keys(content: Any, where: str, known: set[str]) -> None:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {content!r}")
    for key in content:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'; known are: {', '.join(sorted(known))}")


def _no_paths(value: Any, where: str) -> None:
    """A job names declared datasets; a file path or URL in it is refused, wherever it stands."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _no_paths(key, where)
            _no_paths(inner, f"{where}: {key}")
    elif isinstance(value, list):
        for inner in value:
            _no_paths(inner, where)
    elif isinstance(value, str) and ("/" in value or "\\" in value or value.startswith("~") or "{$" in value):
        raise ConfigError(
            f"{where}: a job may name a dataset that the site declares, never a path, URL or variable; got {value!r}"
        )


def _no_links(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link; FLARE refuses or silently drops links in job folders")
