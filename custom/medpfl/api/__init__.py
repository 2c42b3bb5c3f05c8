# SPDX-License-Identifier: Apache-2.0
"""The Python API, for notebooks and scripts (docs/python.md). Its names are imported from ``medpfl`` itself."""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from medpfl.api.hospital import DataCheck as DataCheck
from medpfl.api.hospital import Model as Model
from medpfl.api.hospital import Place as Place
from medpfl.api.results import ComparisonResult as ComparisonResult
from medpfl.api.results import JobResult as JobResult
from medpfl.api.results import Svg as Svg
from medpfl.bundle import find_job, job_sites
from medpfl.compare.collect import RESULTS, read_results
from medpfl.compare.file import comparison_of, load_comparison
from medpfl.component import class_name, class_paths, is_in_a_module, spec_of
from medpfl.core.errors import ConfigError, MedPFLError, shown
from medpfl.core.temporary import temporary_folder
from medpfl.data.site_file import site_files_in
from medpfl.deployed.model_file import load_deployed
from medpfl.job import EvaluationJob, Job
from medpfl.job import load_job as read_job
from medpfl.results.files import SUMMARY
from medpfl.tasks.contract import Task

Sites = Place | Mapping[str, Place]
"""A folder with ``<hospital>.yaml``, or hospital to its site file."""


def check_data(site: Place, job: Job | EvaluationJob | Place | None = None) -> DataCheck:
    """Read all that a site file declares once, as ``medpfl check-data`` does.

    Args:
        site: the site file.
        job: only the dataset that this job uses is read, and the job's data and network are tried.

    Raises:
        MedPFLError: the site file or the job cannot be used. What is wrong with the data is told, not raised.
    """
    from medpfl.check.check import check_data as check

    loaded = job if job is None or isinstance(job, Job | EvaluationJob) else load_job(job)
    named = (loaded.name, loaded.task) if loaded else None
    return DataCheck(check(Path(site), None, named, lambda what, done, count: None))


def load_job(job: Place) -> Job | EvaluationJob:
    """The job of a folder, or the shipped job of that name; change it with ``dataclasses.replace``.

    Raises:
        ConfigError: there is none, or it is not valid.
    """
    if not isinstance(job, str | os.PathLike):
        raise ConfigError(f"expected a job, a job's folder or the name of a shipped job, got {shown(job)}")
    return read_job(find_job(os.fspath(job)))


def load_model(file: Place) -> Model:
    """A deployed model's file, ``MODEL-CHOICE.safetensors`` at a hospital.

    Raises:
        MedPFLError: it is no such file, or was altered.
    """
    return Model(Path(file), load_deployed(Path(file)))


def load_result(folder: Place) -> JobResult | ComparisonResult:
    """What a job or a comparison left in a folder; also in a folder that FLARE's ``run.get_result()`` names.

    Raises:
        MedPFLError: neither left anything there, or a file was altered.
    """
    path = Path(folder)
    if (path / RESULTS).is_file():
        return ComparisonResult(path.absolute(), read_results(path))
    for place in (path, path / "workspace" / "results", path / "server" / "simulate_job" / "results"):
        if (place / SUMMARY).is_file():
            return JobResult(place.absolute())
    raise MedPFLError(f"{path} holds no results: neither {SUMMARY} of a job nor {RESULTS} of a comparison")


def simulate(
    job: Job | EvaluationJob | Place,
    sites: Sites | None = None,
    results: Place | None = None,
    progress: Callable[[int], None] = lambda rounds: None,
) -> JobResult:
    """Run a job in this process, one hospital after another, without FLARE; equal to FLARE bit for bit on one machine.

    Args:
        job: a job, a job folder, or the name of a shipped job.
        sites: the hospitals; None: the demo data of the shipped job.
        results: new folder; None: ``results/JOB-simulated``.
        progress: called with the number of finished rounds.

    Raises:
        MedPFLError: the job or the hospitals' data cannot be used.
    """
    from medpfl.rounds.simulate import simulate as run
    from medpfl.rounds.simulate import simulate_evaluation

    loaded = job if isinstance(job, Job | EvaluationJob) else load_job(job)
    folder = Path("results") / f"{loaded.name}-simulated" if results is None else Path(results)
    folder = folder.absolute()  # the result is read later, when the session may be in another folder
    with _torch_as_it_was(), temporary_folder() as scratch:
        files = _files(sites)
        if files is None:
            files = job_sites(None, loaded.name, scratch)
        if isinstance(loaded, EvaluationJob):
            simulate_evaluation(loaded, files, folder, folder / "home")
        else:
            # Whatever a component remembers of an earlier run of this very job, here it begins anew.
            loaded = dataclasses.replace(loaded, components=copy.deepcopy(loaded.components))
            run(loaded, files, folder, folder / "home", lambda coordinator: progress(coordinator.done))
    return JobResult(folder)


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """A job sets torch's number of threads, and seeds its generators; a session goes on with its own."""
    threads = torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def compare(
    file: Place | Mapping[str, Any],
    sites: Sites | None = None,
    results: Place | None = None,
    jobs: int = os.cpu_count() or 1,
    scheduler: str | None = None,
) -> ComparisonResult:
    """Compare methods over seeds on the same hospitals, as ``medpfl compare`` does; finished runs are kept.

    Args:
        file: a comparison file, or what it would say; the task may then be an object (``Tabular(dataset="cells")``) and
            a class stand in place of its name (``"methods": {"SoftPull": {"path": SoftPull}}``). Each run imports
            classes in a process of its own, so they must lie in a module, not in a notebook's cell.
        sites: the hospitals; None: the demo that the comparison names.
        results: folder; None: ``results/compare-NAME``.
        jobs: runs at a time, each in a process of its own, >= 1.
        scheduler: address of a Dask scheduler, whose workers do the runs; None: this machine.

    Raises:
        MedPFLError: the comparison or the data cannot be used, or a run failed (the others are kept).
    """
    from medpfl.compare.comparison import carry_out
    from medpfl.compare.plan import Plan
    from medpfl.compare.runner import do_runs

    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    loaded = comparison_of(_named(file), "comparison") if isinstance(file, Mapping) else load_comparison(Path(file))
    folder = Path("results") / f"compare-{loaded.name}" if results is None else Path(results)

    def do(plan: Plan, what: str) -> dict[str, str]:
        return do_runs(plan, folder, jobs, lambda run, reason: None, lambda rounds: None, scheduler)

    content = carry_out(loaded, _files(sites), folder, do)
    if content.failures:
        first = content.failures[0]
        raise MedPFLError(f"{len(content.failures)} runs failed; {first.run}: {first.reason}")
    return ComparisonResult(folder.absolute(), content)


def _check_importable(path: str) -> None:
    if not is_in_a_module(path):
        raise ConfigError(
            f"{path.removeprefix('__main__.')} cannot be compared from where it is defined, for every run is a process "
            "of its own: write it into a module (in a notebook with %%writefile) and import it"
        )


def _named(value: Any) -> Any:
    """As a comparison file would say it: tasks and classes by their names.

    Raises:
        ConfigError: a class that another process cannot import.
    """
    if isinstance(value, Task):
        spec = spec_of(value)
        for path in class_paths(spec):
            _check_importable(path)
        return spec
    if isinstance(value, type):
        _check_importable(class_name(value))
        return class_name(value)
    if isinstance(value, Mapping):
        return {key: _named(inner) for key, inner in value.items()}
    return [_named(inner) for inner in value] if isinstance(value, list | tuple) else value


def _files(sites: Sites | None) -> dict[str, Path] | None:
    """Hospital to its site file.

    Raises:
        ConfigError: the folder is none, or holds no site file.
    """
    if sites is None:
        return None
    if isinstance(sites, Mapping):
        return {site: Path(path) for site, path in sites.items()}
    if not isinstance(sites, str | os.PathLike):
        raise ConfigError(f"expected a folder with site files, or hospital to site file, got {shown(sites)}")
    found = site_files_in(Path(sites))
    if not found:
        raise ConfigError(f"{sites} is no folder with site files (<hospital>.yaml)")
    return found
