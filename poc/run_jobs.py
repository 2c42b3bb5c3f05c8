# SPDX-License-Identifier: Apache-2.0
"""Run jobs on a FLARE POC federation on this machine, of demo hospitals or your own, and show who gained."""

import argparse
import sys
from pathlib import Path

from running import DEFAULT_JOB, add_options, check_writable, console, guarded, hospitals_of, keep_up, run_job

from medpfl.bundle import find_job
from medpfl.flare.poc import Federation
from medpfl.job import load_job


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="poc/run", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"shipped job or job folder (default: {DEFAULT_JOB})")
    add_options(parser)
    options = parser.parse_args()
    return guarded(parser.prog, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    jobs = {find_job(name): load_job(find_job(name)) for name in options.jobs or [DEFAULT_JOB]}
    check_writable(options.results)
    groups: dict[tuple[Path, tuple[str, ...]], list[Path]] = {}
    for folder, job in jobs.items():
        site_files, sites = hospitals_of(job, options.sites)
        groups.setdefault((site_files, tuple(sites)), []).append(folder)
    for (site_files, names), folders in groups.items():
        sites = list(names)
        console.print(f"Hospitals: {', '.join(sites)}; their data and site files: {site_files}", soft_wrap=True)
        console.print("Starting a federation: one server, the hospitals, an admin")
        with Federation(site_files, sites, options.port) as federation:
            for folder in folders:
                run_job(federation, folder, jobs[folder], options.results / jobs[folder].name, options.timeout)
            if options.keep:
                keep_up(federation, folders[0])


if __name__ == "__main__":
    sys.exit(main())
