# SPDX-License-Identifier: Apache-2.0
"""The verb ``medpfl compare``."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from medpfl.core.errors import ConfigError, MedPFLError


def compare(
    file: Annotated[Path, typer.Argument(help="Comparison file (YAML or JSON): task, methods, seeds, rounds.")],
    sites: Annotated[Path | None, typer.Option(help="Folder with <hospital>.yaml files; default: the demo.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: results/compare-<name>.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time, one torch thread each.")] = os.cpu_count() or 1,
    flare: Annotated[bool, typer.Option("--flare", help="Each run as a job on a FLARE POC federation here.")] = False,
    timeout: Annotated[float, typer.Option(help="With --flare: seconds a run may take.")] = 3600,
) -> None:
    """Compare methods over seeds on the same hospitals: leaderboard, gains over local training, and a report.

    Finished runs are kept and not repeated. Exit code 1: a run failed; the others are in the report."""
    from medpfl.bundle import DEMOS
    from medpfl.compare.collect import collect
    from medpfl.compare.console import markdown, print_comparison
    from medpfl.compare.plan import Run, load_comparison, make_plan
    from medpfl.compare.report import write_report
    from medpfl.compare.runner import do_runs, finished
    from medpfl.evaluate.models import write_text

    console = Console()
    if jobs < 1:
        raise MedPFLError(f"--jobs must be at least 1, got {jobs}")
    loaded = load_comparison(file)
    results = output or Path("results") / f"compare-{loaded.name}"
    with tempfile.TemporaryDirectory(prefix="medpfl-") as scratch:
        if sites is None:
            if loaded.demo is None:
                raise ConfigError(f"{file}: name a 'demo' in the file, or give the hospitals' files with --sites")
            sites = Path(scratch) / "sites"
            DEMOS[loaded.demo](sites)
        elif not sites.is_dir():
            raise MedPFLError(f"--sites: {sites} is not a folder")
        with console.status("reading the data"):
            plan = make_plan(loaded, {path.stem: path for path in sorted(sites.glob("*.yaml"))})
            if flare:
                from medpfl.flare.compared import do_runs_over_flare, over_flare

                plan = over_flare(plan)
        kept = sum(finished(results, run) for run in plan.runs)
        if kept:
            console.print(f"{kept} of {len(plan.runs)} runs are done already and kept in {results}", soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            total = len(plan.runs) * loaded.rounds
            bar = progress.add_task(f"{kept}/{len(plan.runs)} runs", total=total, completed=kept * loaded.rounds)

            def advance(rounds: int) -> None:
                done = sum(finished(results, run) for run in plan.runs)
                text = f"{done}/{len(plan.runs)} runs"
                progress.update(bar, completed=done * loaded.rounds + rounds, description=text)

            def tell(run: Run, reason: str | None) -> None:
                if reason:
                    progress.console.print(
                        f"{run.name}, seed {run.seed} failed: {reason}", markup=False, highlight=False, soft_wrap=True
                    )

            if flare:
                failures = do_runs_over_flare(plan, results, timeout, tell, advance)
            else:
                failures = do_runs(plan, results, jobs, tell, advance)
    content = collect(plan, results, failures)
    write_report(content, results)
    write_text(results / "results.md", markdown(content))
    print_comparison(content, results, console)
    if content["failures"]:
        raise typer.Exit(1)
