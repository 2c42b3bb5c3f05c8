# SPDX-License-Identifier: Apache-2.0
"""Run jobs on a FLARE POC federation of demo hospitals on this machine, and show who gained."""

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from progress import Progress
from rich.console import Console

from medpfl.bundle import demo_of, find_bundle, find_job, prepare_demo
from medpfl.core.errors import MedPFLError
from medpfl.evaluate.console import print_results
from medpfl.flare.poc import ADMIN, Federation
from medpfl.job import Job, load_job

DEFAULT_JOB = "softpull_phantom"
FAILED = "FINISHED:"
console = Console()


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="poc/run", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"shipped job or job folder (default: {DEFAULT_JOB})")
    parser.add_argument("--keep", action="store_true", help="leave the federation up afterwards, until Ctrl-C")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder for results (default: results)")
    parser.add_argument("--port", type=int, help="the server's port (default: a free one)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a job may take (default: 3600)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a kill, too, stops the federation
    try:
        jobs = {find_job(name): load_job(find_job(name)) for name in options.jobs or [DEFAULT_JOB]}
        _check_writable(options.results)
        groups: dict[str, list[Path]] = {}
        for folder, job in jobs.items():
            groups.setdefault(demo_of(job.name), []).append(folder)
        for demo, folders in groups.items():
            site_files = find_bundle() / "data" / demo
            sites = prepare_demo(demo, site_files)
            console.print(f"Hospitals: {', '.join(sites)}; their data and site files: {site_files}", soft_wrap=True)
            console.print("Starting a federation: one server, the hospitals, an admin")
            with Federation(site_files, sites, options.port) as federation:
                for folder in folders:
                    _run(federation, folder, jobs[folder], options.results / jobs[folder].name, options.timeout)
                if options.keep:
                    _keep(federation, folders[0])
    except MedPFLError as error:
        Console(stderr=True).print(f"poc/run: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; no process is left.")
        return 130
    return 0


def _check_writable(results: Path) -> None:
    try:
        results.mkdir(parents=True, exist_ok=True)
        probe = results / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise MedPFLError(f"cannot write the results folder {results}: {error.strerror}") from error


def _run(federation: Federation, folder: Path, job: Job, target: Path, timeout: float) -> None:
    started = time.monotonic()
    job_id = federation.submit(folder)
    live = federation.run_folder("server", job_id) / "results" / "metrics.jsonl"
    with Progress(job.name, job.settings.rounds, live, console) as progress:
        while True:
            status = federation.status(job_id)
            progress.update()
            if status.startswith(FAILED):
                break
            if time.monotonic() - started > timeout:
                federation.session.abort_job(job_id)
                raise MedPFLError(f"{job.name} did not finish within {timeout:g} seconds and was aborted")
            time.sleep(0.5)
    if status != "FINISHED:COMPLETED":
        lines = "\n  ".join(federation.decisive_lines(job_id))
        raise MedPFLError(f"{job.name} failed ({status}):\n  {lines}")
    _collect(federation, job, job_id, target)
    print_results(target, console)
    console.print(f"{job.name} took {time.monotonic() - started:.0f} s; everything it left: {target}", soft_wrap=True)


def _collect(federation: Federation, job: Job, job_id: str, target: Path) -> None:
    """Put the server's results in place at once, and beside them what stays at each hospital (all on this machine)."""
    fresh = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(federation.download(job_id), fresh)
    for site in federation.sites:
        models = federation.kits / site / "medpfl" / job.name / "models"
        if models.is_dir():
            shutil.copytree(models, fresh / "hospitals" / site)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def _keep(federation: Federation, job: Path) -> None:
    transfer = federation.kits / ADMIN / "transfer" / "jobs"
    shutil.copytree(find_bundle() / "jobs", transfer, dirs_exist_ok=True)
    console.print("The federation stays up until Ctrl-C. In another terminal, the admin console:")
    console.print(f"  {federation.console_command()}", markup=False, soft_wrap=True)
    console.print(f"and in it, for example: submit_job jobs/{job.name}, list_jobs, download_job JOB_ID, bye")
    while True:
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
