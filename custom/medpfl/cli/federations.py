# SPDX-License-Identifier: Apache-2.0
"""Verbs for federations: on this machine, and the startup kits of real ones."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from medpfl.cli.terminal import console, say

if TYPE_CHECKING:
    from medpfl.flare.provision import Provisioned

DEFAULT_JOB = "fedsm_phantom"
_START = "medpfl site doctor KIT; KIT/startup/start.sh >> KIT/start.log 2>&1"
NEXT = {
    "server": f"medpfl site allow KIT; {_START}",
    "relay": _START,
    "hospital": (
        "site file, and a datalist beside it, into KIT/local/; medpfl site allow KIT; medpfl site forbid-code KIT; "
        f"{_START}"
    ),
    "lead": "KIT/startup/fl_admin.sh, there: submit_job, list_jobs, download_job",
    "project_admin": "KIT/startup/fl_admin.sh, there: check_status server",
}

app = typer.Typer()
poc = typer.Typer(no_args_is_help=True, help="A whole federation on this machine: server, hospitals and an admin.")
app.add_typer(poc, name="poc")

SitesOption = Annotated[
    Path | None,
    typer.Option(help="Folder with <hospital>.yaml site files and their data (default: the job's demo data)."),
]
KeepOption = Annotated[bool, typer.Option("--keep", help="Leave the federation up afterwards, until Ctrl-C.")]
ResultsOption = Annotated[Path, typer.Option(help="Folder for results.")]
PortOption = Annotated[int | None, typer.Option(help="The server's port (default: a free one).", min=1, max=65535)]
ProjectOption = Annotated[Path | None, typer.Option(help="FLARE project file (default: the bundle's example).")]
TimeoutOption = Annotated[float, typer.Option(help="Seconds a job may take.", min=1)]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C stops the federation before the command ends."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("Stopped; no process is left.")
        raise typer.Exit(130) from None


@poc.command("run")
def poc_run(
    names: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Shipped jobs or job folders.")] = None,
    sites: SitesOption = None,
    keep: KeepOption = False,
    results: ResultsOption = Path("results"),
    port: PortOption = None,
    timeout: TimeoutOption = 3600,
) -> None:
    """Run jobs on a FLARE POC federation on this machine, of demo hospitals or your own, and show who gained.

    Without a JOB: fedsm_phantom, which generates its own data."""
    from medpfl.bundle import find_job
    from medpfl.flare.poc import Federation
    from medpfl.flare.running import check_targets, check_writable, classes_to_allow, hospitals_of, keep_up, run_job
    from medpfl.job import load_job

    jobs = {find_job(name): load_job(find_job(name)) for name in names or [DEFAULT_JOB]}
    check_writable(results)
    check_targets(results, jobs)
    groups: dict[tuple[Path, tuple[str, ...]], list[Path]] = {}
    for folder, job in jobs.items():
        site_files, hospitals = hospitals_of(job, sites)
        groups.setdefault((site_files, tuple(hospitals)), []).append(folder)
    with _interruptible():
        for (site_files, group), folders in groups.items():
            say(f"Hospitals: {', '.join(group)}; their data and site files: {site_files}")
            console.print("Starting a federation: one server, the hospitals, an admin")
            with Federation(site_files, list(group), port, classes_to_allow(folders)) as federation:
                for folder in folders:
                    run_job(federation, folder, jobs[folder], results / jobs[folder].name, timeout, console)
                if keep:
                    keep_up(federation, folders[0], console)


@poc.command("hospitals")
def poc_hospitals(
    name: Annotated[str, typer.Argument(metavar="[JOB]", help="Shipped job or job folder.")] = DEFAULT_JOB,
    sites: SitesOption = None,
    keep: KeepOption = False,
    results: ResultsOption = Path("results"),
    port: PortOption = None,
    timeout: TimeoutOption = 3600,
    workspace: Annotated[Path | None, typer.Option(help="New folder for kits, data and logs, kept afterwards.")] = None,
    project: ProjectOption = None,
) -> None:
    """Run a job with provisioned hospitals on this machine: startup kits, mutual TLS, a folder for each hospital."""
    from medpfl.bundle import find_bundle, find_job
    from medpfl.data.site_file import load_site_file
    from medpfl.flare.hospitals import HospitalFederation, check_named
    from medpfl.flare.running import check_targets, check_writable, classes_to_allow, hospitals_of, keep_up, run_job
    from medpfl.job import load_job

    folder = find_job(name)
    job = load_job(folder)
    check_writable(results)
    check_targets(results, {folder: job})
    site_files, hospitals = hospitals_of(job, sites)
    for site in hospitals:  # their paths are written anew into each kit
        load_site_file(site_files, site)
    if project is not None:
        check_named(project, hospitals)
    project = project or find_bundle() / "poc" / "project.yml"
    classes = classes_to_allow([folder])
    federation = HospitalFederation(
        project, site_files, hospitals, port, classes, workspace=workspace, copy_data=sites is None
    )
    console.print("Provisioning, and starting the server and the hospitals by their start.sh (about 20 s)")
    with _interruptible(), federation:
        for site in hospitals:
            say(f"  {site}: {federation.workspace / site}")
        console.print(f"Submitting from the kit of {federation.lead}; no hospital accepts code inside a job")
        run_job(federation, folder, job, results / job.name, timeout, console)
        if keep:
            keep_up(federation, folder, console)
        console.print("Shutting down from the project admin's kit")


@app.command("provision")
def provision_(
    project: ProjectOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write into.")] = Path("kits"),
    example: Annotated[Path | None, typer.Option(help="Write the example project file there; no kits.")] = None,
) -> None:
    """Make the startup kits of a federation and say who gets which, how, and what each person runs next."""
    from medpfl.bundle import find_bundle
    from medpfl.core.errors import MedPFLError
    from medpfl.flare.provision import provision

    shipped = find_bundle() / "poc" / "project.yml"
    if example is None:
        _tell(provision(project or shipped, output))
        return
    if example.exists():
        raise MedPFLError(f"{example} is there already and is not overwritten")
    try:
        shutil.copyfile(shipped, example)
    except OSError as error:
        raise MedPFLError(f"cannot write {example}: {error.strerror}") from error
    say(f"wrote {example}: change what is marked CHANGE, then: medpfl provision --project {shlex.quote(str(example))}")


def _tell(made: "Provisioned") -> None:
    from medpfl.flare.identity import SOON, soon_ended
    from medpfl.flare.kits import HOSPITALS
    from medpfl.flare.provision import preflight

    table = Table("kit", "goes to", title=escape(f"Startup kits in {made.folder}"), title_justify="left")
    for person in made.people:
        table.add_row(person.kit.name, f"{person.role} of {person.org}")
    console.print(table)
    others = f"; but those of {', '.join(made.moved)} have another address, and are to be handed out again"
    stay = f"the same as before: kits handed out earlier stay valid{others if made.moved else ''}"
    kept = "new" if made.first else stay
    lines = [
        f"Root certificate ({kept}), valid until {made.root.not_valid_after_utc.date()}, SHA-256:",
        f"  {made.fingerprint}",
        "A kit holds a private key. Hand each over to its person only, encrypted, for example with",
        f"  tar -cz -C {shlex.quote(str(made.folder))} KIT | gpg --symmetric -o KIT.tgz.gpg",
        "and tell the passphrase and the SHA-256 by telephone; 'medpfl site doctor KIT' shows it to them.",
        f"Keep {made.state} in a safe: it holds the root's private key; who has it can join as anybody.",
        "Then (docs/roles/hospital-it.md, docs/roles/lead.md), with the same version of MedPFL installed everywhere:",
        *(f"  {role}: {steps}" for role, steps in NEXT.items() if role in {person.role for person in made.people}),
    ]
    if late := [f"{person.kit.name} ({end:%Y-%m-%d})" for person in made.people if (end := soon_ended(person.kit))]:
        said = f"Certificates that have ended, or end within {SOON} days: {', '.join(late)}. Provisioning again returns"
        lines.insert(2, f"{said} the same ones: for new ones provision into a new folder, and hand all kits out again.")
    server = next(person.kit for person in made.people if person.role == "server")
    if not made.first:  # by the list in its kit a job's events tell which hospitals are missing
        copied = shlex.quote(str(server.local / HOSPITALS))
        lines.append(f"To the server's kit that is in use, tell which hospitals there are now: cp {copied} KIT/local/")
    if any(person.kit.host == "localhost" for person in made.people):
        lines += [
            "The kits look for the server on their own machine: for real sites, delete default_host in the project.",
            f"FLARE's preflight check of the server kit on this machine: {'; '.join(preflight(server)) or 'passed'}",
        ]
    for line in lines:
        say(line)
