# SPDX-License-Identifier: Apache-2.0
"""The verb ``medpfl compare``."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from medpfl.cli.common import console, say
from medpfl.core.errors import ConfigError, MedPFLError

if TYPE_CHECKING:
    from medpfl.compare.plan import Plan
    from medpfl.compare.runs import Run


def compare(
    file: Annotated[Path, typer.Argument(help="Comparison file (YAML or JSON): task, methods, seeds, rounds.")],
    sites: Annotated[Path | None, typer.Option(help="Folder with <hospital>.yaml files; default: the demo.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: results/compare-<name>.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time, one torch thread each.")] = os.cpu_count() or 1,
    flare: Annotated[bool, typer.Option("--flare", help="Each run as a job on a FLARE POC federation here.")] = False,
    timeout: Annotated[float, typer.Option(help="With --flare: seconds a run may take.")] = 3600,
) -> None:
    """Compare methods over seeds (and splits) on the same hospitals: leaderboard, gains over local training, a report.

    Finished runs are kept and not repeated. Exit code 1: a run failed; the others are in the report."""
    from medpfl.bundle import DEMOS
    from medpfl.compare.collect import collect
    from medpfl.compare.console import markdown, print_comparison
    from medpfl.compare.file import load_comparison
    from medpfl.compare.plan import decide, make_plan
    from medpfl.compare.report import write_report
    from medpfl.compare.runner import do_runs
    from medpfl.deployed.evaluate import write_text

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
            for path in sites.glob("*.yaml"):  # public data, in a folder that goes with this command
                path.write_text(f"{path.read_text()}\nstorage: {{cache: ../prepared, cache_gb: 2}}\n")
        elif not sites.is_dir():
            raise MedPFLError(f"--sites: {sites} is not a folder")
        with console.status("reading the data"):
            plan = make_plan(loaded, {path.stem: path for path in sorted(sites.glob("*.yaml"))})
        if flare:
            from medpfl.flare.compared import over_flare

            plan = over_flare(plan)
        failures: dict[str, str] = {}
        if plan.searches:
            searching = [run for search in plan.searches for runs in search.runs for run in runs]
            failures.update(_do(replace(plan, runs=searching), "searching runs", results, partial(do_runs, jobs=jobs)))
            plan = decide(plan, results)
        if flare:
            from medpfl.flare.compared import do_runs_over_flare

            failures.update(_do(plan, "runs", results, partial(do_runs_over_flare, timeout=timeout)))
        else:
            failures.update(_do(plan, "runs", results, partial(do_runs, jobs=jobs)))
        content = collect(plan, results, failures)
        examples = None
        if loaded.examples:
            from medpfl.compare.examples import examples_of

            examples = examples_of(plan, content, results)
    write_report(content, results, examples)
    write_text(results / "results.md", markdown(content))
    print_comparison(content, results, console)
    if content.failures:
        raise typer.Exit(1)


def _do(plan: "Plan", what: str, results: Path, do: Callable[..., dict[str, str]]) -> dict[str, str]:
    """Do the plan's runs that are not done yet, with their progress shown; returns why runs failed, by digest."""
    from medpfl.compare.runner import finished

    runs, rounds = plan.runs, plan.file.rounds
    kept = sum(finished(results, run) for run in runs)
    if kept:
        console.print(f"{kept} of {len(runs)} {what} are done already and kept in {results}", soft_wrap=True)
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
