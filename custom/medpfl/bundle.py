# SPDX-License-Identifier: Apache-2.0
"""The bundle around the package: its manifest (meta.json), its jobs and the demo data they run on."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

import medpfl
from medpfl.core.errors import ConfigError, DataError, meant

PACKAGED = Path(__file__).resolve().parent / "_bundle"
"""Where a wheel has meta.json, jobs/ and poc/project.yml of the checkout it was built from (pyproject.toml)."""


def prepare_demo(name: str, folder: Path) -> list[str]:
    """Write a demo's hospitals into ``folder`` unless they are there already; returns their names.

    The folder appears whole and is never rewritten while it is right, so that two runs at once can share it.

    Raises:
        DataError: the demo needs data that are not there, or the folder cannot be written.
    """
    from medpfl.demo.known import DATA_OF, DEMOS, MADE_WITH

    stamp = f"{name} {medpfl.__version__} {MADE_WITH.get(name, '')} {os.environ.get(DATA_OF.get(name, ''), '')}"
    mark = folder / ".made-by-medpfl"
    if not mark.exists() or mark.read_text(encoding="utf-8") != stamp:
        fresh, old = (folder.with_name(f".{folder.name}-{what}-{os.getpid()}") for what in ("new", "old"))
        try:
            DEMOS[name](fresh)
            (fresh / mark.name).write_text(stamp, encoding="utf-8")
            if folder.exists():
                folder.rename(old)
            with contextlib.suppress(OSError):  # another run was quicker and made the same
                fresh.rename(folder)
        except OSError as error:
            raise DataError(f"cannot write the demo data into {folder}: {error.strerror}") from error
        finally:
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)
    return sorted(path.stem for path in folder.glob("*.yaml"))


def installed_bundle() -> Path:
    """The bundle that came with this package: of a wheel the copy inside it, else the checkout it was installed from.

    Raises:
        ConfigError: the package came without one (inside a packed job).
    """
    for folder in (PACKAGED, PACKAGED.parents[2]):
        if _is_bundle(folder):
            return folder
    raise ConfigError("no bundle found: run this inside a checkout of MedPFL (a folder with meta.json and jobs/)")


def find_bundle() -> Path:
    """The bundle's folder: the working directory or one above it, else the one that came with this package.

    Raises:
        ConfigError: there is none.
    """
    return next((folder for folder in (Path.cwd(), *Path.cwd().parents) if _is_bundle(folder)), None) or (
        installed_bundle()
    )


def _is_bundle(folder: Path) -> bool:
    return (folder / "meta.json").is_file() and (folder / "jobs").is_dir()


def demo_folder(name: str) -> Path:
    """Where a demo's data are kept between runs: ``data/`` of the checkout, of the working directory without one."""
    bundle = find_bundle()
    return (Path.cwd() if bundle == PACKAGED else bundle) / "data" / name


class ShippedJob(BaseModel):
    """What the manifest says of a job; ``demo``: name of the demo data it runs on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: str
    task: str
    paper: str
    data: str
    data_licence: str
    demo: str | None = None


class Manifest(BaseModel):
    """The bundle's meta.json; ``tested_with``: package to version or versions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bundle: Literal["medpfl"]
    version: str
    description: str
    licence: str
    tested_with: dict[str, str | list[str]]
    jobs: dict[str, ShippedJob]


def manifest(bundle: Path) -> Manifest:
    """What the bundle's meta.json says.

    Raises:
        ConfigError: it is not JSON or not a MedPFL bundle.
    """
    file = bundle / "meta.json"
    try:
        return Manifest.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{file} is not the manifest of a MedPFL bundle: '{place}': {first['msg'].lower()}"
        ) from error


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
    known = sorted(path.name for path in (bundle / "jobs").iterdir() if (path / "meta.json").is_file())
    near = meant(name, known)
    listed = "one of the shipped jobs, which 'medpfl jobs' lists" if near else f"one of {', '.join(known)}"
    raise ConfigError(f"there is no job '{name}': it is neither a job folder nor {listed}{near}")


def demo_of(job: str) -> str:
    """Name of the demo data a shipped job runs on.

    Raises:
        ConfigError: the job is not in the manifest, or has no demo data.
    """
    jobs = manifest(find_bundle()).jobs
    if job not in jobs:
        raise ConfigError(f"job '{job}' is not in meta.json, so it has no demo data; give its site files with --sites")
    name = jobs[job].demo
    if name is None:
        raise ConfigError(f"job '{job}' has no demo data: {jobs[job].data}; give its site files with --sites")
    return name


def job_sites(sites: Path | None, job: str, scratch: Path) -> dict[str, Path]:
    """Hospital to its site file: those of the folder ``sites``, or the job's demo, written into ``scratch``.

    Raises:
        ConfigError: ``sites`` is not a folder, or the job has no demo data.
    """
    if sites is None:
        from medpfl.demo.known import DEMOS

        sites = scratch / "sites"
        DEMOS[demo_of(job)](sites)
    elif not sites.is_dir():
        raise ConfigError(f"--sites: {sites} is not a folder")
    from medpfl.data.site_file import site_files_in

    return site_files_in(sites)
