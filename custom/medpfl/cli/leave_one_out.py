# SPDX-License-Identifier: Apache-2.0
"""The verb ``medpfl leave-one-out``."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from medpfl.cli.terminal import JobArgument, console, say
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.temporary import temporary_folder


def leave_one_out(
    job: JobArgument,
    sites: Annotated[Path | None, typer.Option(help="Folder with <hospital>.yaml files; default: demo data.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds, counted from the job's own.")] = 1,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: results/<job>-left-out.")] = None,
    jobs: Annotated[
        int, typer.Option(help="Runs at a time, one torch thread each.", show_default="one a processor")
    ] = os.cpu_count() or 1,
) -> None:
    """Run a job without each hospital in turn, in process, and test what it gives at the hospital left out.

    Finished runs are kept and not repeated. Exit code 1: a run failed; the others are in the table."""
    from medpfl.bundle import find_job, job_sites
    from medpfl.compare.fold_table import collect, frequencies, page, scores
    from medpfl.compare.folds import Fold, make_folds
    from medpfl.compare.run_results import FoldRun
    from medpfl.compare.runner import do_runs, finished, read_run
    from medpfl.deployed.evaluate import write_text
    from medpfl.job import Job, load_job
    from medpfl.results.compact import compact
    from medpfl.results.files import json_of
    from medpfl.results.terminal_blocks import print_table

    if jobs < 1:
        raise MedPFLError(f"--jobs must be at least 1, got {jobs}")
    loaded = load_job(find_job(job))
    if not isinstance(loaded, Job):
        raise ConfigError(f"job '{loaded.name}' only evaluates a given model; there is nothing to train without a site")
    results = output or Path("results") / f"{loaded.name}-left-out"
    with temporary_folder() as scratch:
        files = job_sites(sites, loaded.name, scratch)
        with console.status("reading the data"):
            folds = make_folds(loaded, files, seeds)
        rounds, total = loaded.settings.rounds, len(folds.runs)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=total * rounds)

            def advance(begun: int) -> None:
                done = sum(finished(results, fold) for fold in folds.runs)
                progress.update(bar, completed=done * rounds + begun, description=f"{done}/{total} runs")

            def tell(fold: Fold, reason: str | None) -> None:
                if reason:
                    say(f"without {fold.without}, seed {fold.seed} failed: {reason}")

            advance(0)
            do_runs(folds, results, jobs, tell, advance)
    found = [read_run(results, fold, FoldRun) for fold in folds.runs if finished(results, fold)]
    if not found:
        raise MedPFLError("no run is finished; there is nothing to tell")
    content = collect(found)
    write_text(results / "leave-one-out.json", compact(json_of(content)))
    write_text(results / "leave-one-out.md", page(content, loaded.name))
    score = content.measure.label(content.score)
    for title, given in (
        (f"test {score} at the hospital left out", scores(content)),
        ("served by", frequencies(content)),
    ):
        if given:
            print_table(console, title, *given)
    say(str(results / "leave-one-out.md"))
    if len(found) < total:
        raise typer.Exit(1)
