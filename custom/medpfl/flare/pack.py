# SPDX-License-Identifier: Apache-2.0
"""Make a self-contained job folder with the code inside: for FLARE's simulator and for sites that allow such jobs."""

import importlib
import json
import shutil
from pathlib import Path

import medpfl
from medpfl.bundle import PACKAGED
from medpfl.component import class_paths, spec_of
from medpfl.core.errors import MedPFLError
from medpfl.job import EvaluationJob, Job, load_job


def pack(job: Path, target: Path, manifest_entry: dict[str, str] | None = None) -> Path:
    """Copy a job and the code it needs (this package, and those of other people whose classes the job names) to
    ``target/<job's name>``, stamped with version and manifest entry.

    Raises:
        ConfigError: the job is not valid.
        MedPFLError: the folder exists already or cannot be written.
    """
    loaded = load_job(job)
    name = loaded.name
    folder = target / name
    if folder.exists():
        raise MedPFLError(f"{folder} exists already; remove it or pack into another folder")
    unfinished = target / f".{name}.packing"
    unwanted = shutil.ignore_patterns("__pycache__", ".__nvfl_*", PACKAGED.name)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(job, unfinished, ignore=unwanted)
        custom = unfinished / "app" / "custom"
        for source in _code_of(loaded):
            if source.is_dir():
                shutil.copytree(source, custom / source.name, ignore=unwanted)
            else:
                shutil.copy(source, custom)
        stamp = {"medpfl": medpfl.__version__, "job": name, "manifest": manifest_entry or {}}
        (custom / "medpfl_pack.json").write_text(json.dumps(stamp, indent=2), encoding="utf-8")
        unfinished.rename(folder)
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def _code_of(job: Job | EvaluationJob) -> list[Path]:
    """Folders of the top-level packages (files of modules) whose classes the job names, this package's first."""
    components = [job.method, job.task, *job.trackers, *(job.components.values() if isinstance(job, Job) else ())]
    names = {path.partition(".")[0] for path in class_paths([spec_of(component) for component in components])}
    found = []
    for name in (medpfl.__name__, *sorted(names - {medpfl.__name__})):
        file = Path(importlib.import_module(name).__file__ or "")
        found.append(file.parent if file.name == "__init__.py" else file)
    return found
