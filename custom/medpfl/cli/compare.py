# SPDX-License-Identifier: Apache-2.0
"""The verb ``medpfl compare``."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from medpfl.cli.terminal import console, say
from medpfl.core.errors import ConfigError, MedPFLError

if TYPE_CHECKING:
    from medpfl.compare.plan import Plan
    from medpfl.compare.runs import Run


def compare(
    file: Annotated[Path, typer.Argument(help="Comparison file (YAML or JSON): task, methods, seeds, rounds.")],
    sites: Annotated[Path | None, typer.Option(help="Folder with <hospital>.yaml files; default: the demo.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: results/compare-<name>.")] = None,
    jobs: Annotated[
        int, typer.Option(help="Runs at a time, one torch thread each.", show_default="one a processor")
    ] = os.cpu_count() or 1,
    flare: Annotated[bool, typer.Option("--flare", help="Each run as a job on a FLARE POC federation here.")] = False,
    timeout: Annotated[float, typer.Option(help="With --flare: seconds a run may take.", min=1)] = 3600,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler (tcp://host:8786): its workers do the runs.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Afterwards: write the finished runs here as MLflow runs.")
    ] = None,
) -> None:
    """Compare methods over seeds (and splits) on the same hospitals: leaderboard, gains over local training, a report.

    Finished runs are kept and not repeated. Exit code 1: a run failed; the others are in the report."""
    from medpfl.compare.comparison import carry_out
    from medpfl.compare.comparison_tables import print_comparison
    from medpfl.compare.file import load_comparison
    from medpfl.compare.runner import do_runs
    from medpfl.data.site_file import site_files_in

    if jobs < 1:
        raise MedPFLError(f"--jobs must be at least 1, got {jobs}")
    if flare and scheduler is not None:
        raise MedPFLError("--flare runs on a federation here, --scheduler on a Dask cluster; give one of them")
    loaded = load_comparison(file)
    results = output or Path("results") / f"compare-{loaded.name}"
    if sites is None and loaded.demo is None:
        raise ConfigError(f"{file}: name a 'demo' in the file, or give the hospitals' files with --sites")
    if sites is not None and not sites.is_dir():
        raise MedPFLError(f"--sites: {sites} is not a folder")
    files = site_files_in(sites) if sites else None
    way: Callable[..., dict[str, str]] = partial(do_runs, jobs=jobs, scheduler=scheduler)
    with console.status("reading the data") as status:

        def do(plan: "Plan", what: str) -> dict[str, str]:
            status.stop()
            return _do(plan, what, results, way)

        if flare:
            from medpfl.flare.compared import do_runs_over_flare, over_flare

            way = partial(do_runs_over_flare, timeout=timeout)
            content = carry_out(loaded, files, results, do, over_flare)
        else:
            content = carry_out(loaded, files, results, do)
    print_comparison(content, results, console)
    if mlflow:
        from medpfl.compare.tracked import write_comparison

        say(f"{write_comparison(content, results, mlflow)} runs were written to MLflow")
    if content.failures:
        raise typer.Exit(1)


def _do(plan: "Plan", what: str, results: Path, do: Callable[..., dict[str, str]]) -> dict[str, str]:
    """Do the plan's runs that are not done yet, with their progress shown; returns why runs failed, by digest."""
    from medpfl.compare.runner import finished

    runs, rounds = plan.runs, plan.file.rounds
    kept = sum(finished(results, run) for run in runs)
    if kept:
        say(f"{kept} of {len(runs)} {what} are done already and kept in {results}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"{kept}/{len(runs)} {what}", total=len(runs) * rounds, completed=kept * rounds)

        def advance(begun: int) -> None:
            done = sum(finished(results, run) for run in runs)
            progress.update(bar, completed=done * rounds + begun, description=f"{done}/{len(runs)} {what}")

        def tell(run: "Run", reason: str | None) -> None:
            if reason:
                say(f"{run.title} failed: {reason}")

        return do(plan, results, tell=tell, tick=advance)
