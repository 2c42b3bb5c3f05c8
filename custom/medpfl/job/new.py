# SPDX-License-Identifier: Apache-2.0
"""A job of one's own, made from another one."""

import dataclasses
import inspect
import json
from pathlib import Path

from pydantic import JsonValue

from medpfl.component import build, find_class
from medpfl.core.errors import ConfigError, meant
from medpfl.data.schema import Schema
from medpfl.job.contents import Job
from medpfl.job.names import CLIENT_FILE
from medpfl.job.writing import new_folder, write_job
from medpfl.tasks.contract import Task


def new_job(
    job: Job,
    name: str,
    target: Path,
    dataset: str | None = None,
    task: str | None = None,
    hospitals: int | None = None,
    rounds: int | None = None,
    schema: Schema | None = None,
) -> Path:
    """Write ``target/<name>``: ``job`` with another name and what else is given; whole or not at all.

    Args:
        dataset: what the task learns from, as the hospitals' site files call it.
        task: class of the task, by its name (Segmentation) or full name; its other arguments are its own defaults.
        hospitals: how many must answer for a round to count.
        schema: what every hospital's declaration of the dataset must follow; it names the dataset, too.

    Raises:
        ConfigError: the name cannot be a job's, there is no such task, or what is given does not fit together.
        MedPFLError: the folder exists already or cannot be written.
    """
    if schema is not None:
        if dataset not in (None, schema.dataset):
            raise ConfigError(f"the schema describes the dataset '{schema.dataset}', not '{dataset}'")
        dataset = schema.dataset
    learnt = job.task
    if task is not None:
        learnt = _built(_task(task), dataset or job.task.dataset)
    elif dataset is not None:
        learnt = dataclasses.replace(job.task, dataset=dataset)  # type: ignore[type-var]
    settings = dataclasses.replace(
        job.settings, rounds=rounds or job.settings.rounds, schema=schema.digest if schema else None
    )
    least = hospitals or job.min_clients
    made = dataclasses.replace(job, name=name, task=learnt, settings=settings, min_clients=least)
    return new_folder(target, name, lambda folder: write_job(made, folder))


def _built(path: str, dataset: str) -> Task:
    """The task with its own defaults.

    Raises:
        ConfigError: it needs more than a dataset; with the place where that can be said.
    """
    given: dict[str, JsonValue] = {"dataset": dataset}
    try:
        built: Task = build({"path": path, "args": given}, Task, "the task")
    except ConfigError as error:
        kind = find_class(path, "the task")
        if not issubclass(kind, Task):
            raise
        needed = [name for name, one in inspect.signature(kind).parameters.items() if one.default is one.empty]
        example = {"path": path, "args": {**{name: "..." for name in needed}, **given}}
        raise ConfigError(
            f"{error}. Its defaults, with which --task takes a task, are not enough: make the job without "
            f"--task, and write it into the job's {CLIENT_FILE} in place of the other, as "
            f'"task": {json.dumps(example)} '
            "(docs/tasks.md has examples)"
        ) from error
    return built


def _task(name: str) -> str:
    """The full name of a task's class."""
    import medpfl.tasks as tasks

    if "." in name:
        return name
    known = {kind.__name__: kind for kind in vars(tasks).values() if isinstance(kind, type) and issubclass(kind, Task)}
    known.pop("Task")
    if name not in known:
        raise ConfigError(f"there is no task '{name}'; there are: {', '.join(sorted(known))}{meant(name, known)}")
    return f"{known[name].__module__}.{name}"
