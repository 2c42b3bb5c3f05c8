# SPDX-License-Identifier: Apache-2.0
"""Write a job that tests a given model at every hospital."""

import json
import os
import re
import shutil
from pathlib import Path

from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.deployed.model_file import load_deployed
from medpfl.job import EVALUATION_CONTROLLER, EXECUTOR, load_job
from medpfl.rounds.evaluation import MODEL_FILE


def write_evaluation_job(model: Path, target: Path, name: str | None = None) -> Path:
    """Write the job folder ``target/<name>``: the model without its history, and the configuration it was made with.

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
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"the job's name must be letters, digits, '.', '_' or '-', got {name!r}")
    folder, unfinished = target / name, target / f".{name}.{os.getpid()}"
    if folder.exists():
        raise MedPFLError(f"{folder} exists already; remove it or choose another name")
    server = {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": 0.1},
        "workflows": [{"id": "controller", "path": EVALUATION_CONTROLLER, "args": {"timeout": 3600.0}}],
        "components": [],
    }
    executor = {"path": EXECUTOR, "args": {"method": recipe.method, "task": recipe.task}}
    client = {"format_version": 2, "executors": [{"tasks": ["*"], "executor": executor}], "components": []}
    meta = {"name": name, "min_clients": 1, "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}}
    config = unfinished / "app" / "config"
    try:
        config.mkdir(parents=True)
        for path, content in (
            (unfinished / "meta.json", meta),
            (config / "config_fed_server.json", server),
            (config / "config_fed_client.json", client),
        ):
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        given = deployed.meta.model_copy(update={"history": None})
        given.write(config / MODEL_FILE, deployed.networks.state_dict())
        load_job(unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
