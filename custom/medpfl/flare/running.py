# SPDX-License-Identifier: Apache-2.0
"""A job on a federation of this machine, from submission to its table; keeping a federation up."""

import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console

from medpfl.bundle import demo_folder, demo_of, find_bundle, prepare_demo
from medpfl.component import class_paths, is_named
from medpfl.core.errors import MedPFLError, reason_of
from medpfl.data.site_file import site_files_in
from medpfl.flare.federation import LocalFederation
from medpfl.flare.progress import Progress
from medpfl.job import EvaluationJob, Job
from medpfl.job.files import read_object
from medpfl.job.names import CLIENT_FILE, SERVER_FILE
from medpfl.results.files import FAILURE, LINES, SUMMARY
from medpfl.results.terminal_table import print_results


def hospitals_of(job: Job | EvaluationJob, sites: Path | None) -> tuple[Path, list[str]]:
    """The folder of site files and the hospitals' names: the given ones, else the job's demo, written if need be.

    Raises:
        MedPFLError: the folder holds no site files, or the job has no demo data.
    """
    if sites is None:
        demo = demo_of(job.name)
        folder = demo_folder(demo)
        return folder, prepare_demo(demo, folder)
    names = list(site_files_in(sites))
    if not names:
        raise MedPFLError(f"--sites: {sites} holds no site file (<hospital>.yaml)")
    return sites, names


def classes_to_allow(folders: Iterable[Path]) -> list[str]:
    """What the sites of a federation on this machine must allow for these job folders beside MedPFL's own classes:
    those of packages that this machine's user, whose sites they are, names in ``MEDPFL_PACKAGES``."""
    files = [folder / "app" / "config" / name for folder in folders for name in (SERVER_FILE, CLIENT_FILE)]
    return sorted({path for file in files for path in class_paths(read_object(file)) if is_named(path)})


def check_writable(results: Path) -> None:
    """Before anything is started.

    Raises:
        MedPFLError: the results could not be written.
    """
    try:
        results.mkdir(parents=True, exist_ok=True)
        probe = results / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise MedPFLError(f"cannot write the results folder {results}: {error.strerror}") from error


def check_targets(results: Path, jobs: Mapping[Path, Job | EvaluationJob]) -> None:
    """Before anything is started, whether each job's results have a place of their own.

    Args:
        jobs: job folder to job.

    Raises:
        MedPFLError: two jobs have one name, or something else than results is in a job's place.
    """
    named: dict[str, Path] = {}
    for folder, job in jobs.items():
        if job.name in named:
            raise MedPFLError(
                f"{named[job.name]} and {folder} are both named '{job.name}', and what jobs leave lies under their "
                "names: change the name in one meta.json, or run one after the other with --results of its own"
            )
        named[job.name] = folder
        target = results / job.name
        held = [path.name for path in target.iterdir()] if target.is_dir() else [target.name] * target.exists()
        if held and not {SUMMARY, LINES, FAILURE} & set(held):
            raise MedPFLError(
                f"{target} holds something else than a job's results, which would take its place: name another folder "
                "by --results"
            )


def run_job(
    federation: LocalFederation,
    folder: Path,
    job: Job | EvaluationJob,
    target: Path,
    timeout: float,
    console: Console,
) -> None:
    """Submit a job, follow it, put its results into ``target`` and print the table.

    Raises:
        MedPFLError: the job failed (with the log lines that say why) or took too long.
    """
    started = time.monotonic()
    job_id = federation.submit(folder)
    live = federation.run_folder("server", job_id) / "results" / "metrics.jsonl"
    rounds = job.settings.rounds if isinstance(job, Job) else 0
    with Progress(job.name, rounds, live, console) as progress:
        warning = federation.follow(job_id, job.name, timeout, progress.update)
    _collect(federation, job, job_id, target)
    print_results(target, console)
    if warning:
        console.print(warning, soft_wrap=True)
    took = f"{job.name} took {time.monotonic() - started:.0f} s; everything it left: {target}"
    console.print(took, markup=False, emoji=False, soft_wrap=True)


def _collect(federation: LocalFederation, job: Job | EvaluationJob, job_id: str, target: Path) -> None:
    """Put the server's results in place at once, and beside them what stays at each hospital (all on this machine).

    Raises:
        MedPFLError: they cannot be written; what was there before stays.
    """
    place = target.resolve()  # a link stays one, and what it names is replaced
    fresh, copied = place.with_name(f".{place.name}-{os.getpid()}"), False
    downloaded = federation.download(job_id)
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(downloaded, fresh)
        for site in federation.sites:
            models = federation.models(site, job.name)
            if models.is_dir():
                shutil.copytree(models, fresh / "hospitals" / site)
        copied = True
        _replace(place, fresh)
    except OSError as error:
        if not copied:
            shutil.rmtree(fresh, ignore_errors=True)
        said = f"{job.name} has ended, and its results cannot be written to {target}: {reason_of(error)}"
        raise MedPFLError(f"{said}; they lie in {fresh}" if copied else said) from error


def _replace(place: Path, fresh: Path) -> None:
    """Put a folder in the place of another, which goes when it has; raises OSError, and then it is where it was."""
    if not place.exists():
        fresh.rename(place)
        return
    before = fresh.with_name(f"{fresh.name}-before")
    place.rename(before)
    try:
        fresh.rename(place)
    except OSError:
        before.rename(place)
        raise
    shutil.rmtree(before, ignore_errors=True)


def keep_up(federation: LocalFederation, job: Path, console: Console) -> None:
    """Until Ctrl-C, with the shipped jobs where the admin console finds them."""
    transfer = federation.kit(federation.submitter) / "transfer" / "jobs"
    shutil.copytree(find_bundle() / "jobs", transfer, dirs_exist_ok=True)
    console.print("The federation stays up until Ctrl-C. In another terminal, the admin console:")
    console.print(f"  {federation.console_command()}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"and in it, for example: submit_job jobs/{job.name}, list_jobs, download_job JOB_ID, bye")
    while True:
        time.sleep(1)
