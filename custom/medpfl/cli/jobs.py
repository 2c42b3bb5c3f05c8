# SPDX-License-Identifier: Apache-2.0
"""Verbs for jobs: list, check, simulate, pack, show what they left behind."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from medpfl.cli.terminal import JobArgument, ModelArgument, console, say
from medpfl.core.errors import MedPFLError
from medpfl.core.temporary import temporary_folder

if TYPE_CHECKING:
    from medpfl.job import Job

app = typer.Typer()
job_app = typer.Typer(no_args_is_help=True, help="Jobs of your own.")
app.add_typer(job_app, name="job")


@app.command()
def jobs() -> None:
    """List the shipped jobs."""
    from medpfl.bundle import find_bundle, manifest

    table = Table(Column("job", no_wrap=True), "what it learns", show_lines=True)
    for name, entry in manifest(find_bundle()).jobs.items():
        table.add_row(
            f"[bold]{escape(name)}[/]\n{escape(entry.method)}",
            escape(f"{entry.task}\ndata: {entry.data}\nsource: {entry.paper}"),
        )
    console.print(table)


@app.command()
def check_job(
    job: JobArgument,
    site_file: Annotated[Path | None, typer.Option(help="Also: would this hospital's policy let it run?")] = None,
    sites: Annotated[Path | None, typer.Option(help="Also: could the hospitals of these site files begin it?")] = None,
) -> None:
    """Check a job folder before it is submitted: every key, class, argument and slot.

    With --sites, every hospital whose site file lies in that folder gets ready as it would for the server. Exit code 1:
    one of them could not take part."""
    from medpfl.bundle import find_job
    from medpfl.job import EvaluationJob, load_job

    loaded = load_job(find_job(job))
    if isinstance(loaded, EvaluationJob):
        console.print(
            f"{loaded.name} is valid: evaluates a given model, {loaded.method!r} on {loaded.task!r}", markup=False
        )
        return
    slots = ", ".join(f"{slot} ({mixer!r})" for slot, mixer in loaded.mixers.items())
    console.print(f"{loaded.name} is valid: {loaded.method!r} on {loaded.task!r}; slots: {slots}", markup=False)
    if loaded.codecs:
        console.print(f"messages are encoded: {loaded.codecs!r}", markup=False)
    if loaded.trackers:
        console.print(f"trackers: {', '.join(map(repr, loaded.trackers))}", markup=False)
    if site_file:
        _check_policy(loaded, site_file)
    if sites:
        _rehearse(loaded, sites)


@app.command()
def leaves(
    job: JobArgument,
    hospitals: Annotated[
        int | None,
        typer.Option(help="How many take part: some statistics are asked for only where there are many.", min=1),
    ] = None,
    site: Annotated[
        Path | None, typer.Option(help="A site file: which lines this hospital's policy refuses; its data are read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    page: Annotated[Path | None, typer.Option(help="With --site: an HTML page for the file of processing.")] = None,
) -> None:
    """Everything that leaves a hospital in a job, as a table: for whoever decides whether to join."""
    from medpfl.bundle import find_job
    from medpfl.data.site_file import load_site_file
    from medpfl.job import load_job
    from medpfl.rounds.hospital import before
    from medpfl.rounds.leaves import as_table, leaves_of

    loaded = load_job(find_job(job))
    if site is None:
        if page is not None:
            raise MedPFLError("--page: name the hospital's site file with --site, for the page says its policy's word")
        lines = leaves_of(loaded, hospitals)
        say(json.dumps([asdict(line) for line in lines], indent=1) if as_json else as_table(lines))
        return
    found = before.prospect(loaded, load_site_file(site), hospitals)
    say(json.dumps(asdict(found), indent=1) if as_json else before.as_table(found))
    if page is not None:
        before.write_page(found, page)
    if not as_json:
        say(f"{found.refused} of {len(found.lines)} lines are refused here. Seen only when the job runs:")
        for text in found.afterwards:
            say(f"- {text}")


def _check_policy(job: "Job", file: Path) -> None:
    """Say a hospital's policy, and whether the job keeps to it on the hospital's data."""
    from medpfl.data.site_file import load_site_file
    from medpfl.rounds.hospital.before import check_policy

    site = load_site_file(file)
    for line in site.policy.described():
        say(f"policy: {line}")
    check_policy(job, site)
    say(f"{job.name} keeps to the policy of {file}")


def _rehearse(job: "Job", folder: Path) -> None:
    """Say who would take part; the command fails if somebody would not."""
    from medpfl.data.site_file import site_files_in
    from medpfl.rounds.rehearsal import rehearse

    if not folder.is_dir():
        raise MedPFLError(f"--sites: {folder} is not a folder")
    files = site_files_in(folder)
    if not files:
        raise MedPFLError(f"--sites: {folder} holds no site file (<hospital>.yaml)")
    found = rehearse(job, files)
    for site in files:
        sizes = found.sizes.get(site)
        ready = ", ".join(f"{split} {count}" for split, count in sizes.items()) if sizes else "would NOT take part"
        say(f"{site}: {ready}{''.join(f'; {sentence}' for sentence in found.told.get(site, []))}")
    for sentence in found.likeness:
        say(f"warning: {sentence}")
    if found.lacking:
        raise MedPFLError(f"{job.name} could not begin: {found.lacking}")
    if len(found.sizes) < len(files):
        raise MedPFLError(f"{len(files) - len(found.sizes)} of {len(files)} hospitals could not begin {job.name}")
    say(f"{len(files)} hospitals can begin {job.name}; it needs {job.min_clients}")


@app.command()
def simulate(
    job: JobArgument,
    sites: Annotated[Path | None, typer.Option(help="Folder with <hospital>.yaml files; default: demo data.")] = None,
    results: Annotated[Path | None, typer.Option(help="Default: results/<job>-simulated.")] = None,
) -> None:
    """Run a job in this process, hospital after hospital, without FLARE: to debug, or on a lone GPU machine."""
    from medpfl.bundle import find_job, job_sites
    from medpfl.job import EvaluationJob, load_job
    from medpfl.results.terminal_table import print_results
    from medpfl.rounds.server.coordinator import Coordinator
    from medpfl.rounds.simulate import simulate as run
    from medpfl.rounds.simulate import simulate_evaluation

    loaded = load_job(find_job(job))
    results = results or Path("results") / f"{loaded.name}-simulated"
    with temporary_folder() as scratch:
        files = job_sites(sites, loaded.name, scratch)
        if isinstance(loaded, EvaluationJob):
            simulate_evaluation(loaded, files, results, results / "home")
        else:
            columns = (TextColumn("round {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn())
            with Progress(*columns, console=console) as progress:
                bar = progress.add_task("rounds", total=loaded.settings.rounds)

                def advance(coordinator: Coordinator) -> None:
                    progress.update(bar, completed=coordinator.done)

                run(loaded, files, results, results / "home", advance, noticed=lambda text: say(f"warning: {text}"))
    print_results(results, console)


@app.command()
def pack(
    job: JobArgument, output: Annotated[Path, typer.Option("-o", "--output", help="Folder to put the packed job in.")]
) -> None:
    """Make a self-contained job folder with the code inside, for FLARE's simulator and sites that allow such jobs."""
    from medpfl.bundle import find_bundle, find_job, manifest
    from medpfl.flare.pack import pack as pack_job

    folder = find_job(job)
    entry = manifest(find_bundle()).jobs.get(folder.name)
    stamp = entry.model_dump(exclude_none=True) if entry else None
    say(str(pack_job(folder, output, stamp, noticed=lambda text: say(f"warning: {text}"))))


@app.command()
def pretrain(
    job: JobArgument,
    sites: Annotated[Path, typer.Option(help="A site file of a public data set, or a folder: all in it are pooled.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The checkpoint, a .safetensors file.")],
    share: Annotated[float, typer.Option(help="Part of every training split, class by class.")] = 0.2,
    epochs: Annotated[int, typer.Option(help="Passes over it.")] = 60,
    declare: Annotated[bool, typer.Option(help="Declare it in these site files under the name the job uses.")] = False,
) -> None:
    """Train a job's network in this process: the checkpoint that FedAP takes its statistics from.

    Not federated: with a folder, rows of all its hospitals are trained on together. For public data and studies."""
    from medpfl.bundle import find_job
    from medpfl.data.site_file import site_files_in
    from medpfl.demo.index_lists import declare_checkpoint
    from medpfl.flare.running import check_writable
    from medpfl.job import EvaluationJob, load_job
    from medpfl.rounds.pretrain import pretrain as run
    from medpfl.store import save

    loaded = load_job(find_job(job))
    if isinstance(loaded, EvaluationJob):
        raise MedPFLError(f"job '{loaded.name}' trains nothing, so it needs no checkpoint")
    files = site_files_in(sites) if sites.is_dir() else {sites.stem: sites}
    names = loaded.method.checkpoints()
    if declare and len(names) != 1:
        beside = " beside its start weights, with which pretraining begins" if loaded.method.start else ""
        raise MedPFLError(
            f"--declare: job '{loaded.name}' uses {len(names)} checkpoints{beside}, so it gives this one no name"
        )
    check_writable(output.parent)  # training may take hours
    with Progress(TextColumn("epoch {task.completed}/{task.total}"), BarColumn(), console=console) as progress:
        bar = progress.add_task("epochs", total=epochs)
        tensors, about = run(loaded, files, share, epochs, lambda epoch, loss: progress.update(bar, completed=epoch))
    save(output, tensors, about.model_dump(mode="json"))
    say(f"{output}: {about.samples} samples, SHA-256 {about.sha256}")
    if declare:
        declare_checkpoint(list(files.values()), names[0], output)
        console.print(f"declared as '{names[0]}' in {len(files)} site files")


@job_app.command("new")
def job_new(
    name: Annotated[str, typer.Argument(help="The new job's name.")],
    source: Annotated[str, typer.Option("--from", help="A job folder, or the name of a shipped job.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to put the job folder in.")] = Path("jobs"),
    dataset: Annotated[str | None, typer.Option(help="The dataset's name, as site files have it.")] = None,
    task: Annotated[str | None, typer.Option(help="Classification, Segmentation, Tabular, TimeSeries, ...")] = None,
    hospitals: Annotated[int | None, typer.Option(help="How many must answer for a round to count.", min=1)] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.", min=1)] = None,
    schema: Annotated[Path | None, typer.Option(help="A schema that every hospital's data must follow.")] = None,
) -> None:
    """Write a job of your own, made from another one: with its method, for another dataset, or another task."""
    from medpfl.bundle import find_job
    from medpfl.data.schema import read_schema
    from medpfl.job import EvaluationJob, load_job
    from medpfl.job.new import new_job

    loaded = load_job(find_job(source))
    if isinstance(loaded, EvaluationJob):
        raise MedPFLError(f"job '{loaded.name}' trains nothing; 'medpfl evaluation-job' writes jobs of this form")
    folder = new_job(loaded, name, output, dataset, task, hospitals, rounds, read_schema(schema) if schema else None)
    quoted = shlex.quote(str(folder))
    say(f"wrote {folder}\nTry it with the hospitals' site files: medpfl check-job {quoted} --sites DIR")


@app.command()
def evaluation_job(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to put the job folder in.")],
    name: Annotated[str | None, typer.Option(help="The job's name; default: evaluate-<model>.")] = None,
) -> None:
    """Write a job that tests a model at every hospital: metrics only, nothing is trained."""
    from medpfl.job import write_evaluation_job

    say(str(write_evaluation_job(model, output, name)))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A job's results folder.")],
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write its numbers here as TensorBoard's event files.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Write its numbers here as MLflow runs, one a hospital.")
    ] = None,
    wandb: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write its numbers here as Weights & Biases' offline runs.")
    ] = None,
) -> None:
    """Print a results folder's table and write its report.html anew."""
    from medpfl.results.report import write_report
    from medpfl.results.terminal_table import print_results

    write_report(folder)
    print_results(folder, console)
    if tensorboard:
        from medpfl.results.trackers.tensorboard import write_tensorboard

        write_tensorboard(folder, tensorboard)
    if mlflow:
        from medpfl.results.trackers.mlflow import write_mlflow

        write_mlflow(folder, mlflow)
    if wandb:
        from medpfl.results.trackers.wandb import write_wandb

        write_wandb(folder, wandb)
