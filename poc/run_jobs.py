# SPDX-License-Identifier: Apache-2.0
"""Run jobs on a FLARE POC federation of demo hospitals on this machine, and show who gained."""

import argparse
import sys
from pathlib import Path

from running import DEFAULT_JOB, add_options, check_writable, console, guarded, keep_up, run_job

from medpfl.bundle import demo_of, find_bundle, find_job, prepare_demo
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
                run_job(federation, folder, jobs[folder], options.results / jobs[folder].name, options.timeout)
            if options.keep:
                keep_up(federation, folders[0])


if __name__ == "__main__":
    sys.exit(main())
