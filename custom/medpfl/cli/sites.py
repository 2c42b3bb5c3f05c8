# SPDX-License-Identifier: Apache-2.0
"""Verbs for a hospital: its data, its site file, its startup kit."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medpfl.cli.terminal import console, say

if TYPE_CHECKING:
    from medpfl.data.contract import Dataset
    from medpfl.data.site_file import SiteFile

app = typer.Typer()
site_app = typer.Typer(no_args_is_help=True, help="For a hospital's startup kit and site file.")
app.add_typer(site_app, name="site")

KitArgument = Annotated[Path, typer.Argument(help="Startup kit: the folder that holds startup/ and local/.")]


@app.command()
def check_data(
    site_file: Annotated[Path, typer.Argument(help="A site file, or a folder that holds <site>.yaml.")],
    site: Annotated[str | None, typer.Option(help="The hospital's name in the federation.")] = None,
    job: Annotated[str | None, typer.Option(help="Could this job run here? A folder, or a shipped job's name.")] = None,
    schema: Annotated[Path | None, typer.Option(help="Does the dataset follow this schema, too?")] = None,
    page: Annotated[Path | None, typer.Option(help="Default: <site file>.check.html beside it.")] = None,
) -> None:
    """Read all declared data once and report counts, ranges, duplicates and every problem; nothing leaves the site.

    With --job, only the dataset the job uses is read, and the job's data and network are tried. Exit code 1: there
    are problems, or the job could not run."""
    from medpfl.bundle import find_job
    from medpfl.check.terminal_check import run
    from medpfl.data.schema import read_schema
    from medpfl.job import load_job

    loaded = load_job(find_job(job)) if job else None
    known = read_schema(schema) if schema else None
    if not run(site_file, site, (loaded.name, loaded.task) if loaded else None, page, console, known):
        raise typer.Exit(1)


@app.command("schema")
def schema_(
    site_file: Annotated[Path, typer.Argument(help="A site file whose declaration all hospitals are to follow.")],
    dataset: Annotated[str | None, typer.Option(help="Which dataset, if it declares several.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: print it.")] = None,
) -> None:
    """Write down what every hospital must declare alike of a dataset: for 'site init --like' and 'check-data --schema'.

    No file, column or code of the hospital is in it."""
    from medpfl.core.errors import SiteFileError
    from medpfl.data.schema import schema_of
    from medpfl.data.site_file import load_site_file
    from medpfl.deployed.evaluate import write_text

    declared = load_site_file(site_file)
    if dataset is None and len(declared.datasets) > 1:
        raise SiteFileError(f"{site_file}: it declares {', '.join(sorted(declared.datasets))}; name one with --dataset")
    name = dataset or next(iter(declared.datasets))
    text = schema_of(name, _declared(declared, name, site_file)).as_yaml()
    if output is None:
        say(text.rstrip())
        return
    if output.exists():
        raise SiteFileError(f"{output} is there already and is not overwritten; name another with -o")
    write_text(output, text)
    say(f"wrote {output}")


def _declared(declared: "SiteFile", name: str, site_file: Path) -> "Dataset":
    from medpfl.core.errors import SiteFileError

    if name not in declared.datasets:
        known = ", ".join(sorted(declared.datasets))
        raise SiteFileError(f"{site_file}: it declares no dataset '{name}'; declared: {known}")
    return declared.datasets[name]


@site_app.command("allow")
def site_allow(
    kit: KitArgument,
    extra: Annotated[list[str] | None, typer.Option("--class", help="Full name of another reviewed class.")] = None,
) -> None:
    """Let jobs name this package's classes, each in full, and those of --class; keep logs and files at the site.

    FLARE's own classes are not among them: name those that the site needs with --class. A person's kit builds nothing:
    there what the server sends is kept in the folder of downloads."""
    from medpfl.core.errors import MedPFLError
    from medpfl.flare.allow import allow
    from medpfl.flare.console import close_console
    from medpfl.flare.kits import is_persons

    if is_persons(kit):
        if extra:
            raise MedPFLError(f"{kit} is a person's kit, which builds nothing that a job names: leave --class out")
        say(f"{close_console(kit)}: what the server sends stays in the folder of downloads")
        return
    allowed = allow(kit, extra or [])
    say(f"{allowed.file}: {len(allowed.classes)} classes are allowed, each by its full name, and no other")
    for name in allowed.dropped:
        say(f"no longer allowed, for it was not named: {name} (again with --class {name})")


@site_app.command("forbid-code")
def site_forbid_code(kit: KitArgument) -> None:
    """Refuse jobs that bring code, whoever submits them: only installed code runs at this site."""
    from medpfl.flare.allow import forbid_code

    say(f"{forbid_code(kit)}: jobs that bring code are refused here")


@site_app.command("doctor")
def site_doctor(kit: KitArgument) -> None:
    """Check a startup kit, this machine and the way to the server; one line each, and how to mend each problem."""
    from medpfl.flare.doctor import examine

    problems = 0
    for finding in examine(kit):
        problems += finding.status == "problem"
        word = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[finding.status]
        say(f"{word} {finding.check}: {finding.text}")
        if finding.mend:
            say(f"        mend: {finding.mend}")
    say(f"{problems} problem(s) to mend" if problems else "This kit can run here.")
    raise typer.Exit(1 if problems else 0)


@site_app.command("init")
def site_init(
    place: Annotated[Path, typer.Argument(help="A folder with data, a table, an .npz file or a datalist.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The site file to write.")] = Path("site.yaml"),
    site: Annotated[str | None, typer.Option(help="This hospital's name in the federation.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset, as jobs call it.")] = None,
    label: Annotated[str | None, typer.Option(help="Column (or array) to predict.")] = None,
    group: Annotated[str | None, typer.Option(help="Column, field or array that names the patient, or none.")] = None,
    patient: Annotated[str | None, typer.Option(help="Volumes: a regular expression for the patient, or file.")] = None,
    masks: Annotated[str | None, typer.Option(help="Images: which files are the masks, if several could be.")] = None,
    inputs: Annotated[str | None, typer.Option(help="Array of an .npz file that holds the images.")] = None,
    kind: Annotated[str | None, typer.Option(help="Tables: recording (each is one) or table (all are one).")] = None,
    window: Annotated[str | None, typer.Option(help="Recordings: how many time steps make a case.")] = None,
    classes: Annotated[list[str] | None, typer.Option("--class", help="NAME=VALUE[,VALUE...], class by class.")] = None,
    like: Annotated[Path | None, typer.Option(help="A schema that the hospitals agreed on.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN: the column of a schema's feature.")] = None,
    code: Annotated[list[str] | None, typer.Option(help="NAME:VALUE=CATEGORY: what a value here means.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take the guesses.")] = False,
) -> None:
    """Look at a folder or a table and write a site file for it; asks what cannot be seen there."""
    from medpfl.data.init.answers import Answers, parse_classes
    from medpfl.data.init.like import parse_codes, parse_columns
    from medpfl.data.init.write import write_site_file
    from medpfl.data.schema import read_schema

    flags = {
        "site": site, "dataset": dataset, "label": label, "group": group, "patient": patient, "masks": masks,
        "inputs": inputs, "kind": kind, "window": window,
    }  # fmt: skip
    given = {flag: value for flag, value in flags.items() if value is not None}
    ask = None if yes else lambda question, guess: str(typer.prompt(question, default=guess or None))
    answers = Answers(
        given,
        parse_classes(classes or []),
        ask,
        read_schema(like) if like else None,
        parse_columns(column or []),
        parse_codes(code or []),
    )
    for path in write_site_file(place, output, answers):
        say(f"wrote {path}")
    schema = ["--schema", str(like)] if like else []
    say(f"Read it, then check the data: {shlex.join(['medpfl', 'check-data', str(output), *schema])}")


@site_app.command("split")
def site_split(
    site_file: Annotated[Path, typer.Argument(help="A site file, in which 'split.file' of a dataset names a file.")],
    dataset: Annotated[str | None, typer.Option(help="Which dataset, if several name one.")] = None,
) -> None:
    """Write into a dataset's split file in which split each patient is; those that are in it stay where they are.

    Run it again when there are new patients. The file stays at the hospital."""
    from medpfl.core.errors import DataError, SiteFileError
    from medpfl.data.site_file import load_site_file
    from medpfl.data.split_file import extend

    declared = load_site_file(site_file)
    named = [name for name, one in declared.datasets.items() if one.split.file]
    if dataset is None and len(named) != 1:
        said = f"datasets that name one: {', '.join(named)}; choose with --dataset" if named else "none is named"
        raise SiteFileError(f"{site_file}: expected 'file' in the 'split' of one dataset, {said}")
    name = dataset or named[0]
    try:
        drawn = extend(_declared(declared, name, site_file))
    except DataError as error:
        raise DataError(f"{site_file}: dataset '{name}': {error}") from error
    for split, count in drawn.groups.items():
        say(f"{split}: {count}, {drawn.new[split]} of them new")
    if drawn.gone:
        say(f"{drawn.gone} that are in the file have no case now")
    say(f"wrote {drawn.path}")


@site_app.command("page")
def site_page(
    folder: Annotated[Path, typer.Argument(help="Where a job left this hospital's models.")],
) -> None:
    """Write a hospital's own page of a job again: what joining brought, for its clinicians. It stays here."""
    from medpfl.rounds.hospital.page import write_page

    say(str(write_page(folder)))
