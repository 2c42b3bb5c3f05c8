# SPDX-License-Identifier: Apache-2.0
"""Make a self-contained job folder with the code inside: for FLARE's simulator and for sites that allow such jobs."""

import json
import shutil
from pathlib import Path

import medpfl
from medpfl.core.errors import MedPFLError
from medpfl.job import load_job


def pack(job: Path, target: Path, manifest_entry: dict[str, str] | None = None) -> Path:
    """Copy a job and this package's code to ``target/<job's name>``, stamped with version and manifest entry.

    Raises:
        ConfigError: the job is not valid.
        MedPFLError: the folder exists already or cannot be written.
    """
    name = load_job(job).name
    folder = target / name
    if folder.exists():
        raise MedPFLError(f"{folder} exists already; remove it or pack into another folder")
    unfinished = target / f".{name}.packing"
    package = Path(medpfl.__file__).parent
    unwanted = shutil.ignore_patterns("__pycache__", ".__nvfl_*", "bench")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(job, unfinished, ignore=unwanted)
        shutil.copytree(package, unfinished / "app" / "custom" / package.name, ignore=unwanted)
        stamp = {"medpfl": medpfl.__version__, "job": name, "manifest": manifest_entry or {}}
        (unfinished / "app" / "custom" / "medpfl_pack.json").write_text(json.dumps(stamp, indent=2), encoding="utf-8")
        unfinished.rename(folder)
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
    return folder
