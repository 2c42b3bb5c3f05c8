# SPDX-License-Identifier: Apache-2.0
"""Make a self-contained job folder with the code inside: for FLARE's simulator and for sites that allow such jobs."""

import importlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import medpfl
from medpfl.bundle import PACKAGED
from medpfl.component import class_paths, spec_of
from medpfl.core.errors import MedPFLError, reason_of
from medpfl.job import EvaluationJob, Job, load_job

_log = logging.getLogger(__name__)


def pack(
    job: Path,
    target: Path,
    manifest_entry: dict[str, str] | None = None,
    noticed: Callable[[str], None] = _log.warning,
) -> Path:
    """Copy a job and the code it needs (this package, and those of other people whose classes the job names) to
    ``target/<job's name>``, stamped with version and manifest entry.

    Of other people's packages only the ``.py`` files go in: what else lies in their folders, tables of patients maybe,
    must not go to every hospital.

    Args:
        noticed: is told what was left out.

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
        shutil.copytree(Path(medpfl.__file__).parent, custom / medpfl.__name__, ignore=unwanted)
        left = [f"{name}/{file}" for name in _others(loaded) for file in _copy_code(name, custom)]
        stamp = {"medpfl": medpfl.__version__, "job": name, "manifest": manifest_entry or {}}
        (custom / "medpfl_pack.json").write_text(json.dumps(stamp, indent=2), encoding="utf-8")
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk would stay full
        raise MedPFLError(f"cannot write {folder}: {reason_of(error)}") from error
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        noticed(
            "only .py files of other packages go into a job, and none of folders that are links; left out: "
            f"{', '.join(left[:3])}{more}"
        )
    return folder


def _others(job: Job | EvaluationJob) -> list[str]:
    """Top-level packages and modules, but for this package, whose classes the job names."""
    components = [job.method, job.task, *job.trackers, *(job.components.values() if isinstance(job, Job) else ())]
    named = [*class_paths([spec_of(component) for component in components])]
    if isinstance(job, Job):
        codecs = (job.codecs.to_site, job.codecs.from_site) if job.codecs else ()
        named += [*class_paths([spec_of(codec) for codec in codecs if codec]), *job.filters]
    return sorted({path.partition(".")[0] for path in named} - {medpfl.__name__})


def _copy_code(name: str, custom: Path) -> list[str]:
    """Put the code of a module or a package into ``custom``; returns which of the package's files are none."""
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        shutil.copy(Path(module.__file__ or ""), custom)
        return []
    left = []
    for folder in map(Path, module.__path__):  # several, or one without __init__.py, if it is a namespace
        for file in sorted(folder.rglob("*")):
            inside = file.relative_to(folder)
            linked = file.is_dir() and file.is_symlink()  # it may lead to patients' data, and is not gone into
            if any(part == "__pycache__" or part.startswith(".") for part in inside.parts):
                continue
            if file.is_dir() and not linked:
                continue
            if linked or file.suffix != ".py":
                left.append(inside.as_posix())
                continue
            (custom / name / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, custom / name / inside)
    return left
