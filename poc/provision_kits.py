# SPDX-License-Identifier: Apache-2.0
"""Make the startup kits of a federation and say who gets which, how, and what each person runs next."""

import argparse
import sys
from pathlib import Path

from rich.table import Table
from running import console, guarded

from medpfl.flare.provision import Provisioned, preflight, provision

NEXT = {
    "server": "medpfl site allow KIT; medpfl site doctor KIT; KIT/startup/start.sh",
    "hospital": "site file into KIT/local/; medpfl site allow KIT; medpfl site doctor KIT; KIT/startup/start.sh",
    "lead": "KIT/startup/fl_admin.sh, there: submit_job, list_jobs, download_job",
    "project_admin": "KIT/startup/fl_admin.sh, there: check_status server",
}


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="poc/provision", description=__doc__)
    default = Path(__file__).parent / "project.yml"
    parser.add_argument("--project", type=Path, default=default, help="FLARE project file (default: poc/project.yml)")
    parser.add_argument("-o", "--output", type=Path, default=Path("kits"), help="folder to write into (default: kits)")
    options = parser.parse_args()
    return guarded(parser.prog, lambda: _tell(provision(options.project, options.output)))


def _tell(made: Provisioned) -> None:
    table = Table("kit", "goes to", title=f"Startup kits in {made.folder}", title_justify="left")
    for person in made.people:
        table.add_row(person.kit.name, f"{person.role} of {person.org}")
    console.print(table)
    kept = "new" if made.first else "the same as before: kits handed out earlier stay valid"
    lines = [
        f"Root certificate ({kept}), valid until {made.root.not_valid_after_utc.date()}, SHA-256:",
        f"  {made.fingerprint}",
        "A kit holds a private key. Hand each over to its person only, encrypted, for example with",
        f"  tar -cz -C {made.folder} KIT | gpg --symmetric -o KIT.tgz.gpg",
        "and tell the passphrase and the SHA-256 by telephone; 'medpfl site doctor KIT' shows it to them.",
        f"Keep {made.state} in a safe: it holds the root's private key; who has it can join as anybody.",
        "Then (docs/roles/hospital-it.md, docs/roles/lead.md), after 'pip install .' of the same version everywhere:",
        *(f"  {role}: {steps}" for role, steps in NEXT.items() if role in {person.role for person in made.people}),
    ]
    if any(person.kit.host == "localhost" for person in made.people):
        server = next(person.kit for person in made.people if person.role == "server")
        lines += [
            "The kits look for the server on their own machine: for real sites, delete default_host in the project.",
            f"FLARE's preflight check of the server kit on this machine: {'; '.join(preflight(server)) or 'passed'}",
        ]
    for line in lines:
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
