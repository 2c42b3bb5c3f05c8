# SPDX-License-Identifier: Apache-2.0
"""Write a job folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import JsonValue

from medpfl.component import class_paths, is_in_a_module, spec_of
from medpfl.core.codecs import Codec
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.tied import own_state
from medpfl.deployed.model_file import load_deployed
from medpfl.job.codecs import TASKS
from medpfl.job.contents import Job
from medpfl.job.declared import FILTERS, name_of
from medpfl.job.files import Object
from medpfl.job.names import (
    CLIENT_FILE,
    CONTROLLER,
    DECODE,
    ENCODE,
    EVALUATION_CONTROLLER,
    EXECUTOR,
    MODEL_FILE,
    SERVER_FILE,
)
from medpfl.job.reading import load_job


def write_job(job: Job, folder: Path) -> Path:
    """The job folder that ``load_job`` reads back as ``job``; a folder that exists is written over.

    Components that equal the method's own are left out.

    Raises:
        MedPFLError: it cannot be written, or it has filters of other people, whose arguments only its files hold.
        ConfigError: it has a class that no other process could import.
    """
    if job.filters:
        raise MedPFLError(f"job '{job.name}' has filters that would be lost in a copy of it: {', '.join(job.filters)}")
    usual = job.method.components()
    components: list[JsonValue] = [
        {"id": slot, **spec_of(mixer)} for slot, mixer in job.components.items() if mixer != usual.get(slot)
    ]
    server = _server(CONTROLLER, vars(job.settings), components)
    if job.trackers:
        server["trackers"] = [spec_of(tracker) for tracker in job.trackers]
    client = _client(spec_of(job.method), spec_of(job.task))
    if job.codecs:
        server |= _filters(_encoder(job.codecs.to_site), {"path": DECODE})
        client |= _filters({"path": DECODE}, _encoder(job.codecs.from_site))
    for path in class_paths([server, client]):
        if not is_in_a_module(path):
            raise ConfigError(
                f"job '{job.name}' cannot be written: {path.rpartition('.')[2]} is defined in a script, a notebook's "
                "cell or a function, where nobody else could import it; write it into a module and import it"
            )
    try:
        _write(folder, _meta(job.name, job.min_clients), server, client)
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def write_evaluation_job(model: Path, target: Path, name: str | None = None) -> Path:
    """Write a job that tests a given model at every hospital, to ``target/<name>``: the model without its history, and
    the configuration it was made with.

    Args:
        model: a deployed model's file.
        name: the job's name; None: "evaluate-" and the model's name.

    Raises:
        ConfigError: the name cannot be a job's.
        MedPFLError: the model's file is broken, or the folder exists already or cannot be written.
    """
    deployed = load_deployed(model)
    recipe = deployed.meta.recipe
    name = name or f"evaluate-{recipe.deployed}"
    server = _server(EVALUATION_CONTROLLER, {"timeout": 3600.0}, [])

    def write(unfinished: Path) -> None:
        config = _write(unfinished, _meta(name, 1), server, _client(recipe.method, recipe.task))
        given = deployed.meta.model_copy(update={"history": None})
        given.write(config / MODEL_FILE, own_state(deployed.networks))

    return new_folder(target, name, write)


def new_folder(target: Path, name: str, write: Callable[[Path], object]) -> Path:
    """The job folder ``target/<name>`` with what ``write`` puts into it, once it can be read back; whole or not at all.

    Raises:
        ConfigError: the name cannot be a job's, or what was written is no job.
        MedPFLError: the folder exists already or cannot be written.
    """
    name_of(name, "the job's name")
    folder, unfinished = target / name, target / f".{name}.{os.getpid()}"
    if folder.exists():
        raise MedPFLError(f"{folder} exists already; remove it or choose another name")
    try:
        write(unfinished)
        load_job(unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _meta(name: str, min_clients: int) -> Object:
    return {"name": name, "min_clients": min_clients, "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}}


def _server(controller: str, args: Object, components: list[JsonValue]) -> Object:
    return {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": 0.1},
        "workflows": [{"id": "controller", "path": controller, "args": args}],
        "components": components,
    }


def _client(method: Object, task: Object) -> Object:
    executor: Object = {"path": EXECUTOR, "args": {"method": method, "task": task}}
    return {"format_version": 2, "executors": [{"tasks": ["*"], "executor": executor}], "components": []}


def _encoder(codec: Codec | None) -> Object:
    return {"path": ENCODE, "args": {"codec": spec_of(codec)} if codec else {}}


def _filters(data: Object, result: Object) -> Object:
    """The filters of one end, on what comes from the server (data) and what goes to it (result)."""
    return {key: [{"tasks": list(TASKS), "filters": [one]}] for key, one in zip(FILTERS, (data, result), strict=True)}


def _write(folder: Path, meta: Object, server: Object, client: Object) -> Path:
    """Write the three files; returns the folder of the configuration. May raise OSError."""
    config = folder / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    for path, content in (
        (folder / "meta.json", meta),
        (config / SERVER_FILE, server),
        (config / CLIENT_FILE, client),
    ):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return config
