# SPDX-License-Identifier: Apache-2.0
"""The command ``medpfl``: one verb each."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import medpfl
from medpfl.cli_compare import compare
from medpfl.core.errors import MedPFLError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=medpfl.__doc__)
site_app = typer.Typer(no_args_is_help=True, help="For a hospital's startup kit and site file.")
demo_app = typer.Typer(no_args_is_help=True, help="Write demo hospitals: their site files, and data where generated.")
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks; each prints its numbers as ratios inside one run.")
app.add_typer(site_app, name="site")
app.add_typer(demo_app, name="demo")
app.add_typer(bench_app, name="bench")
app.command()(compare)
console = Console()

JobArgument = Annotated[str, typer.Argument(help="A job folder, or the name of a shipped job.")]
KitArgument = Annotated[Path, typer.Argument(help="Startup kit: the folder that holds startup/ and local/.")]
FolderArgument = Annotated[Path, typer.Argument(help="Folder to write into.")]


@app.command()
def jobs() -> None:
    """List the shipped jobs."""
    from medpfl.bundle import find_bundle, manifest

    table = Table("job", "method", "task", "data", "paper")
    for name, entry in manifest(find_bundle())["jobs"].items():
        table.add_row(name, entry["method"], entry["task"], entry["data"], entry["paper"])
    console.print(table)


@app.command()
def check_job(job: JobArgument) -> None:
    """Check a job folder before it is submitted: every key, class, argument and slot."""
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


@app.command()
def check_data(
    site_file: Annotated[Path, typer.Argument(help="A site file, or a folder that holds <site>.yaml.")],
    site: Annotated[str | None, typer.Option(help="The hospital's name in the federation.")] = None,
    job: Annotated[str | None, typer.Option(help="Could this job run here? A folder, or a shipped job's name.")] = None,
    page: Annotated[Path | None, typer.Option(help="Default: <site file>.check.html beside it.")] = None,
) -> None:
    """Read all declared data once and report counts, ranges, duplicates and every problem; nothing leaves the site.

    With --job, only the dataset the job uses is read, and the job's data and network are tried. Exit code 1: there
    are problems, or the job could not run."""
    from medpfl.bundle import find_job
    from medpfl.job import load_job
    from medpfl.sites.check.console import run

    loaded = load_job(find_job(job)) if job else None
    if not run(site_file, site, (loaded.name, loaded.task) if loaded else None, page, console):
        raise typer.Exit(1)


@app.command()
def simulate(
    job: JobArgument,
    sites: Annotated[Path | None, typer.Option(help="Folder with <hospital>.yaml files; default: demo data.")] = None,
    results: Annotated[Path | None, typer.Option(help="Default: results/<job>-simulated.")] = None,
) -> None:
    """Run a job in this process, hospital after hospital, without FLARE: to debug, or on a lone GPU machine."""
    from medpfl.bundle import DEMOS, demo_of, find_job
    from medpfl.evaluate.console import print_results
    from medpfl.job import EvaluationJob, load_job
    from medpfl.rounds.coordinator import Coordinator
    from medpfl.rounds.simulate import simulate as run
    from medpfl.rounds.simulate import simulate_evaluation

    loaded = load_job(find_job(job))
    results = results or Path("results") / f"{loaded.name}-simulated"
    with tempfile.TemporaryDirectory(prefix="medpfl-") as scratch:
        if sites is None:
            sites = Path(scratch) / "sites"
            DEMOS[demo_of(loaded.name)](sites)
        elif not sites.is_dir():
            raise MedPFLError(f"--sites: {sites} is not a folder")
        files = {path.stem: path for path in sorted(sites.glob("*.yaml"))}
        if isinstance(loaded, EvaluationJob):
            simulate_evaluation(loaded, files, results, results / "home")
        else:
            columns = (TextColumn("round {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn())
            with Progress(*columns, console=console) as progress:
                bar = progress.add_task("rounds", total=loaded.settings.rounds)

                def advance(coordinator: Coordinator) -> None:
                    progress.update(bar, completed=coordinator.done)

                run(loaded, files, results, results / "home", advance)
    print_results(results, console)


@app.command()
def pack(
    job: JobArgument, output: Annotated[Path, typer.Option("-o", "--output", help="Folder to put the packed job in.")]
) -> None:
    """Make a self-contained job folder with the code inside, for FLARE's simulator and sites that allow such jobs."""
    from medpfl.bundle import find_bundle, find_job, manifest
    from medpfl.flare.pack import pack as pack_job

    folder = find_job(job)
    console.print(str(pack_job(folder, output, manifest(find_bundle())["jobs"].get(folder.name))), soft_wrap=True)


ModelArgument = Annotated[Path, typer.Argument(help="A deployed model: <model>-<choice>.safetensors at a hospital.")]


@app.command()
def export(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder to write into.")],
    form: Annotated[str, typer.Option("--format", help="torchscript, onnx or monai (a MONAI bundle).")],
) -> None:
    """Write a model for software that does not know MedPFL."""
    from medpfl.evaluate.export import export as write

    console.print(str(write(model, output, form)), soft_wrap=True)


@app.command()
def evaluation_job(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to put the job folder in.")],
    name: Annotated[str | None, typer.Option(help="The job's name; default: evaluate-<model>.")] = None,
) -> None:
    """Write a job that tests a model at every hospital: metrics only, nothing is trained."""
    from medpfl.rounds.evaluation_job import write_evaluation_job

    console.print(str(write_evaluation_job(model, output, name)), soft_wrap=True)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A job's results folder.")]) -> None:
    """Print a results folder's table and write its report.html anew."""
    from medpfl.evaluate.console import print_results
    from medpfl.evaluate.report import write_report

    write_report(folder)
    print_results(folder, console)


@app.command()
def predict(
    model: ModelArgument,
    source: Annotated[Path, typer.Argument(help="A file, a folder, a DICOM series or a datalist to predict.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder for the predictions.")],
    probabilities: Annotated[bool, typer.Option(help="Segmentations: write each class's probability too.")] = False,
) -> None:
    """Predict new cases: segmentations in the input's geometry, classes with their probabilities as CSV."""
    from medpfl.evaluate.deployed import load_deployed
    from medpfl.evaluate.predict import predict as run

    deployed = load_deployed(model)
    with console.status("reading") as status:
        done = run(deployed, source, output, probabilities, lambda name: status.update(f"{name} is done"))
    _say(f"{len(done.rows)} cases: {done.file}\n{done.note}")


@app.command()
def evaluate(
    model: ModelArgument,
    site_file: Annotated[Path, typer.Argument(help="Site file that declares the dataset the model was trained on.")],
    split: Annotated[str, typer.Option(help="train, validation or test")] = "test",
    cases: Annotated[Path | None, typer.Option(help="CSV file for one row a case.")] = None,
) -> None:
    """Test a model on a hospital's own declared data, without a federation."""
    from medpfl.evaluate.deployed import load_deployed
    from medpfl.evaluate.models import write_cases
    from medpfl.evaluate.predict import evaluate_at
    from medpfl.sites.declared import SPLITS
    from medpfl.sites.site_file import load_site_file

    if split not in SPLITS:
        raise MedPFLError(f"--split must be {', '.join(SPLITS)}, got '{split}'")
    found = evaluate_at(load_deployed(model), load_site_file(site_file), split)
    for metric, value in found.metrics.items():
        _say(f"{metric} {value:.4f}")
    if cases:
        write_cases(cases, found)
        _say(str(cases))


@site_app.command("allow")
def site_allow(
    kit: KitArgument,
    extra: Annotated[list[str] | None, typer.Option("--class", help="Full name of another reviewed class.")] = None,
) -> None:
    """Let a startup kit run jobs that name this package's classes, each in full; keep logs and files at the site."""
    from medpfl.flare.allow import allow, component_classes

    path = allow(kit, extra or [])
    console.print(f"{path}: {len(component_classes()) + len(extra or [])} MedPFL classes are allowed by name")


@site_app.command("forbid-code")
def site_forbid_code(kit: KitArgument) -> None:
    """Refuse jobs that bring code, whoever submits them: only installed code runs at this site."""
    from medpfl.flare.allow import forbid_code

    console.print(f"{forbid_code(kit)}: jobs that bring code are refused here", soft_wrap=True)


@site_app.command("doctor")
def site_doctor(kit: KitArgument) -> None:
    """Check a startup kit, this machine and the way to the server; one line each, and how to mend each problem."""
    from medpfl.flare.doctor import examine

    problems = 0
    for finding in examine(kit):
        problems += finding.status == "problem"
        word = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[finding.status]
        _say(f"{word} {finding.check}: {finding.text}")
        if finding.mend:
            _say(f"        mend: {finding.mend}")
    _say(f"{problems} problem(s) to mend" if problems else "This kit can run here.")
    raise typer.Exit(1 if problems else 0)


@site_app.command("init")
def site_init(
    place: Annotated[Path, typer.Argument(help="A folder with data, a table, an .npz file or a datalist.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The site file to write.")] = Path("site.yaml"),
    site: Annotated[str | None, typer.Option(help="This hospital's name in the federation.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset, as jobs call it.")] = None,
    label: Annotated[str | None, typer.Option(help="Column (or array) to predict.")] = None,
    group: Annotated[str | None, typer.Option(help="Column that names the patient, or none.")] = None,
    patient: Annotated[str | None, typer.Option(help="Volumes: a regular expression for the patient, or file.")] = None,
    inputs: Annotated[str | None, typer.Option(help="Array of an .npz file that holds the images.")] = None,
    classes: Annotated[list[str] | None, typer.Option("--class", help="NAME=VALUE[,VALUE...], class by class.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take the guesses.")] = False,
) -> None:
    """Look at a folder or a table and write a site file for it; asks what cannot be seen there."""
    from medpfl.sites.init.answers import Answers, parse_classes
    from medpfl.sites.init.write import write_site_file

    flags = {"site": site, "dataset": dataset, "label": label, "group": group, "patient": patient, "inputs": inputs}
    given = {flag: value for flag, value in flags.items() if value is not None}
    ask = None if yes else lambda question, guess: str(typer.prompt(question, default=guess or None))
    for path in write_site_file(place, output, Answers(given, parse_classes(classes or []), ask)):
        _say(f"wrote {path}")
    _say(f"Read it, then check the data: medpfl check-data {output}")


@demo_app.command("phantom")
def demo_phantom(folder: FolderArgument, seed: int = 0) -> None:
    """Four hospitals with generated MR-like phantoms (NIfTI)."""
    from medpfl.demo.phantom import write_phantoms

    console.print(f"{folder}: {', '.join(write_phantoms(folder, seed))}")


@demo_app.command("heart")
def demo_heart(
    folder: FolderArgument,
    data: Annotated[Path | None, typer.Option(help="Folder with the processed.*.data files.")] = None,
    split: Annotated[str, typer.Option(help="validated or flamby")] = "validated",
) -> None:
    """The four hospitals of the UCI heart-disease data."""
    from medpfl.demo.heart import SPLITS, write_heart

    if split not in SPLITS:
        raise MedPFLError(f"--split must be {' or '.join(SPLITS)}, got '{split}'")
    console.print(f"{folder}: {', '.join(write_heart(folder, data, split))}")


SeedsOption = Annotated[int, typer.Option(help="Number of seeds.")]
OutOption = Annotated[Path | None, typer.Option(help="JSON file for the numbers and the machine's facts.")]


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


@bench_app.command("mixing")
def bench_mixing(
    sites: Annotated[int, typer.Option(help="Number of models.")] = 20,
    values: Annotated[int, typer.Option(help="float32 values of a model.")] = 5_000_000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 7,
    out: OutOption = None,
) -> None:
    """Mixing K models, as a multiple of cloning and of copying them."""
    from medpfl.bench import common, mixing

    facts = common.machine()
    results = mixing.measure(sites, values, repeats)
    common.write_json(out, "mixing", facts, results)
    _say(mixing.table_of(results))


@bench_app.command("rounds")
def bench_rounds(
    sites: Annotated[int, typer.Option(help="Number of hospitals.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of each job; the first is not counted.")] = 15,
    values: Annotated[int, typer.Option(help="float32 values of the model, about.")] = 100_000,
    interval: Annotated[float, typer.Option(help="task_request_interval of our job, seconds.")] = 0.1,
    out: OutOption = None,
) -> None:
    """A round without training in POC: this package's controller beside FLARE's stock FedAvg recipe."""
    from medpfl.bench import common
    from medpfl.bench import rounds as bench

    facts = common.machine()
    results = bench.measure(sites, rounds, values, interval, _say)
    common.write_json(out, "rounds", facts, results)
    _say(bench.table_of(results))


@bench_app.command("reading")
def bench_reading(
    images: Annotated[int, typer.Option(help="Number of JPEG files.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    budget_mb: Annotated[float, typer.Option(help="Memory budget for the data larger than it, MB.")] = 100,
    out: OutOption = None,
) -> None:
    """Reading images, as a multiple of the training that waits for them; memory beside its budget."""
    from medpfl.bench import common, reading

    facts = common.machine()
    results = reading.measure(images, repeats, budget_mb)
    common.write_json(out, "reading", facts, results)
    _say(reading.table_of(results))


@bench_app.command("phantom")
def bench_phantom(seeds: SeedsOption = 3, out: OutOption = None) -> None:
    """softpull_phantom against local training, FedAvg and FedAvg + fine-tuning, over several seeds."""
    from medpfl.bench import common, phantom

    facts = common.machine()
    results = phantom.measure(seeds, _say)
    common.write_json(out, "phantom", facts, results)
    _say(phantom.table_of(results))


@bench_app.command("heart")
def bench_heart(
    data: Annotated[Path | None, typer.Option(help="Folder with the UCI processed.*.data files.")] = None,
    flamby: Annotated[Path | None, typer.Option(help="Folder with FLamby's heart_seed<N>.csv.")] = None,
    seeds: SeedsOption = 5,
    out: OutOption = None,
) -> None:
    """FLamby's Fed-Heart-Disease protocol, with SoftPull beside it."""
    from medpfl.bench import common, heart

    facts = common.machine()
    results = heart.measure(data, seeds, flamby, _say)
    common.write_json(out, "heart", facts, results)
    _say(heart.table_of(results))


@app.command()
def version() -> None:
    """Print the version."""
    console.print(medpfl.__version__)


def main() -> None:
    """Entry point: a MedPFLError is one sentence on stderr and exit code 1, never a traceback."""
    try:
        app()
    except MedPFLError as error:
        Console(stderr=True).print(f"medpfl: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
