# SPDX-License-Identifier: Apache-2.0
"""The bundle around the package: its manifest (meta.json), its jobs and the demo data they run on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medpfl.core.errors import ConfigError
from medpfl.demo.heart import write_heart
from medpfl.demo.phantom import write_phantoms

DEMOS: dict[str, Callable[[Path], list[str]]] = {"phantom": write_phantoms, "heart": write_heart}
"""Name of a demo to the function that writes its site files (and data) into a folder and returns the hospitals."""


def find_bundle() -> Path:
    """The bundle's folder: the working directory or one above it, else the checkout this package was installed from.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]):
        if (folder / "meta.json").is_file() and (folder / "jobs").is_dir():
            return folder
    raise ConfigError("no bundle found: run this inside a checkout of MedPFL (a folder with meta.json and jobs/)")


def manifest(bundle: Path) -> dict[str, Any]:
    """The bundle's meta.json.

    Raises:
        ConfigError: it is not JSON or not a MedPFL bundle.
    """
    try:
        content: dict[str, Any] = json.loads((bundle / "meta.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{bundle / 'meta.json'} cannot be read: {error}") from error
    if content.get("bundle") != "medpfl" or not isinstance(content.get("jobs"), dict):
        raise ConfigError(f"{bundle / 'meta.json'} is not the manifest of a MedPFL bundle")
    return content


def find_job(name: str) -> Path:
    """The job folder that a path or a shipped job's name means.

    Raises:
        ConfigError: neither exists.
    """
    if (Path(name) / "meta.json").is_file():
        return Path(name)
    bundle = find_bundle()
    if (bundle / "jobs" / name / "meta.json").is_file():
        return bundle / "jobs" / name
    known = ", ".join(sorted(path.name for path in (bundle / "jobs").iterdir() if (path / "meta.json").is_file()))
    raise ConfigError(f"there is no job '{name}': it is neither a job folder nor one of {known}")


def demo_of(job: str) -> str:
    """Name of the demo data a shipped job runs on.

    Raises:
        ConfigError: the job is not in the manifest.
    """
    jobs = manifest(find_bundle())["jobs"]
    if job not in jobs:
        raise ConfigError(f"job '{job}' is not in meta.json, so it has no demo data; give its site files with --sites")
    name: str = jobs[job]["demo"]
    return name
