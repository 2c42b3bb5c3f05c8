# SPDX-License-Identifier: Apache-2.0
"""Read a job folder and build what it names."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import JsonValue

from medpfl.component import build, class_paths, construct, find_class
from medpfl.core.codecs import Codec
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer
from medpfl.deployed.model_file import load_deployed
from medpfl.job.codecs import Codecs
from medpfl.job.contents import EvaluationJob, Job
from medpfl.job.declared import FILTERS, LAUNCHER, Client, Meta, Server, client_of, meta_of, server_of
from medpfl.job.files import no_links, read_object
from medpfl.job.given import check_no_history, check_recipe
from medpfl.job.names import (
    CLIENT_FILE,
    ENCODE,
    EVALUATION_CONTROLLER,
    HONOURED,
    KNOWS_MESSAGES,
    MODEL_FILE,
    SERVER_FILE,
    foreign_filter,
    not_both,
)
from medpfl.job.settings import EvaluationSettings, Settings
from medpfl.methods.contract import Method
from medpfl.results.callbacks import Callback
from medpfl.tasks.contract import Task


def load_job(folder: Path) -> Job | EvaluationJob:
    """Read a job folder and check everything that can be checked without data.

    Raises:
        ConfigError: one sentence with the file, the key, expected and got.
        MedPFLError: the given model of an evaluation job is broken.
    """
    no_links(folder)
    meta = meta_of(read_object(folder / "meta.json", {LAUNCHER}))
    return load_config(folder / "app" / "config", meta.name, meta.min_clients)


def load_config(
    config: Path, name: str, min_clients: int, allow: Callable[[str], None] = lambda path: None
) -> Job | EvaluationJob:
    """The job of a folder with the two configurations: what ``load_job`` reads, and what FLARE deploys to the server.

    Args:
        allow: told every class that the configurations name, before one is imported; raises for what may not be built.

    Raises:
        ConfigError: as ``load_job``.
    """
    contents = [read_object(config / file) for file in (SERVER_FILE, CLIENT_FILE)]
    for path in class_paths(contents):
        allow(path)
    meta, server, client = Meta(name, min_clients), server_of(contents[0]), client_of(contents[1])
    for where, others in ((SERVER_FILE, server.others), (CLIENT_FILE, client.others)):
        _check_filters(where, others)
    _check_filters(CLIENT_FILE, [path for path in client.leaving if path not in HONOURED])
    if client.filters and (both := [str(one) for one in client.leaving if one in HONOURED]):
        raise ConfigError(f"{CLIENT_FILE}: {not_both(both[0], ENCODE)}")
    if server.controller == EVALUATION_CONTROLLER:
        return _evaluation(meta, server, client, config / MODEL_FILE)
    return _training(meta, server, client)


def _check_filters(where: str, paths: Sequence[JsonValue]) -> None:
    """Refuse filters that were not written for our messages; nothing of FLARE's is imported to find out."""
    for path in paths:
        ours = isinstance(path, str) and not path.startswith("nvflare.")
        if not ours or getattr(find_class(path, where), KNOWS_MESSAGES, False) is not True:
            raise ConfigError(f"{where}: {foreign_filter(path)}")


def load_trackers(config: Path, allow: Callable[[str], None]) -> tuple[Callback, ...]:
    """The trackers alone, for a server that imports nothing else of what a job names; arguments as ``load_config``.

    Raises:
        ConfigError: as ``load_job``.
    """
    server = server_of(read_object(config / SERVER_FILE))
    for path in class_paths(list(server.trackers)):
        allow(path)
    return _trackers(server)


def _trackers(server: Server) -> tuple[Callback, ...]:
    found: list[Callback] = []
    for number, spec in enumerate(server.trackers):
        where = f"{SERVER_FILE}: trackers[{number}]"
        tracker: Callback = build(spec, Callback, where)
        if not dataclasses.is_dataclass(tracker):
            raise ConfigError(f"{where}: a tracker must be a dataclass; {type(tracker).__name__} is none")
        found.append(tracker)
    return tuple(found)


def _training(meta: Meta, server: Server, client: Client) -> Job:
    method, task = _learnt(client)
    settings = construct(Settings, server.args, f"{SERVER_FILE}: controller")
    components: dict[str, Mixer] = {
        slot: build(spec, Mixer, f"{SERVER_FILE}: component '{slot}'") for slot, spec in server.components.items()
    }
    codecs, filters = _codecs(server, client), tuple(str(path) for path in (*client.others, *client.leaving))
    try:
        return Job(meta.name, meta.min_clients, settings, components, method, task, codecs, _trackers(server), filters)
    except ConfigError as error:
        raise ConfigError(f"{SERVER_FILE}: {error}") from error


def _evaluation(meta: Meta, server: Server, client: Client, model: Path) -> EvaluationJob:
    if server.components:
        raise ConfigError(f"{SERVER_FILE}: 'components' must be empty: a job that evaluates mixes nothing")
    if server.filters or client.filters:
        raise ConfigError(f"{SERVER_FILE}: a job that evaluates takes no codec filters")
    method, task = _learnt(client)
    settings = construct(EvaluationSettings, server.args, f"{SERVER_FILE}: controller")
    given = load_deployed(model).meta
    check_no_history(given)
    check_recipe(given.recipe, method, task)
    return EvaluationJob(meta.name, meta.min_clients, settings, method, task, model, _trackers(server))


def _learnt(client: Client) -> tuple[Method, Task]:
    method: Method = build(client.method, Method, f"{CLIENT_FILE}: method")
    task: Task = build(client.task, Task, f"{CLIENT_FILE}: task")
    return method, task


def _codecs(server: Server, client: Client) -> Codecs | None:
    """What the codec filters say; None if the job has none."""
    if not server.filters and not client.filters:
        return None
    for file, end in ((SERVER_FILE, server), (CLIENT_FILE, client)):
        for key in FILTERS:
            if key not in end.filters:
                raise ConfigError(
                    f"{file}: {key}: no codec filter here, but at the other places; a job has all four or none"
                )
    # What a side sends, it encodes: the server its task data, a hospital its task results.
    to_site, from_site = FILTERS
    return Codecs(_codec(server, SERVER_FILE, to_site), _codec(client, CLIENT_FILE, from_site))


def _codec(end: Server | Client, file: str, key: str) -> Codec | None:
    given = end.filters[key].codec
    where = f"{file}: {key}: {ENCODE.rpartition('.')[2]}: codec"
    codec: Codec | None = build(given, Codec, where) if given is not None else None
    return codec
