# SPDX-License-Identifier: Apache-2.0
"""Run a job with provisioned hospitals on this machine: startup kits, mutual TLS, each hospital a folder of its own."""

import argparse
import sys
from pathlib import Path

from running import DEFAULT_JOB, add_options, check_writable, console, guarded, hospitals_of, keep_up, run_job

from medpfl.bundle import find_bundle, find_job
from medpfl.flare.hospitals import HospitalFederation
from medpfl.job import load_job


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="poc/hospitals", description=__doc__)
    parser.add_argument("job", nargs="?", default=DEFAULT_JOB, help=f"shipped job (default: {DEFAULT_JOB})")
    add_options(parser)
    parser.add_argument("--workspace", type=Path, help="new folder for kits, data and logs, kept afterwards")
    options = parser.parse_args()
    return guarded(parser.prog, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    folder = find_job(options.job)
    job = load_job(folder)
    check_writable(options.results)
    site_files, sites = hospitals_of(job, options.sites)
    federation = HospitalFederation(
        find_bundle() / "poc" / "project.yml",
        site_files,
        sites,
        options.port,
        workspace=options.workspace,
        copy_data=options.sites is None,
    )
    console.print("Provisioning, and starting the server and the hospitals by their start.sh (about 20 s)")
    with federation:
        for site in sites:
            console.print(f"  {site}: {federation.workspace / site}", soft_wrap=True, highlight=False)
        console.print(f"Submitting from the kit of {federation.lead}; no hospital accepts code inside a job")
        run_job(federation, folder, job, options.results / job.name, options.timeout)
        if options.keep:
            keep_up(federation, folder)
        console.print("Shutting down from the project admin's kit")


if __name__ == "__main__":
    sys.exit(main())
