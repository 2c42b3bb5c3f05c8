# SPDX-License-Identifier: Apache-2.0
"""A comparison from its file to its tables and report, for the command and for the Python API."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from medpfl.compare.collect import collect
from medpfl.compare.comparison_tables import markdown
from medpfl.compare.examples import examples_of
from medpfl.compare.file import Comparison
from medpfl.compare.plan import Plan, decide, make_plan, widen
from medpfl.compare.report import write_report
from medpfl.compare.results import Results
from medpfl.core.errors import ConfigError
from medpfl.core.extras import require
from medpfl.core.temporary import temporary_folder
from medpfl.deployed.evaluate import write_text

Do = Callable[[Plan, str], dict[str, str]]
"""Does the runs of a plan that are not done yet, given what they are called; returns why runs failed, by digest."""


def carry_out(
    file: Comparison,
    site_files: Mapping[str, Path] | None,
    results: Path,
    do: Do,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Results:
    """Make the plan, do its runs, write results.json, results.md and report.html into ``results``.

    Args:
        site_files: hospital to its site file; None: the demo that the comparison names.
        change: what is changed in the plan before its runs begin.

    Raises:
        ConfigError: there are no site files, or matplotlib is not installed, which draws the report.
        MedPFLError: as ``make_plan``, ``do`` and ``collect``.
    """
    require("matplotlib", "compare", "a comparison's report")
    with hospitals_of(file, site_files) as files:
        plan = change(make_plan(file, files))
        failures: dict[str, str] = {}
        if plan.searches:
            plan = _searched(plan, results, do, failures)
        failures.update(do(plan, "runs"))
        content = collect(plan, results, failures)
        examples = examples_of(plan, content, results) if file.examples else None
    write_report(content, results, examples)
    write_text(results / "results.md", markdown(content))
    return content


def _searched(plan: Plan, results: Path, do: Do, failures: dict[str, str]) -> Plan:
    """Do the searches, in as many turns as candidates follow from others' scores; the plan with what they chose."""
    known: set[str] = set()
    wider: Plan | None = plan
    while wider is not None:
        plan = wider
        runs = [run for search in plan.searches for of_seeds in search.runs for run in of_seeds]
        new = [run for run in runs if run.digest not in known]
        known.update(run.digest for run in new)
        failures.update(do(replace(plan, runs=new), "searching runs"))
        wider = widen(plan, results)
    return decide(plan, results)


@contextmanager
def hospitals_of(file: Comparison, site_files: Mapping[str, Path] | None) -> Iterator[dict[str, Path]]:
    """These, or those of the demo that the comparison names, whose data are removed afterwards.

    Raises:
        ConfigError: there are neither.
    """
    if site_files is not None:
        yield dict(site_files)
        return
    if file.demo is None:
        raise ConfigError(f"comparison '{file.name}' names no 'demo' in its file: give the hospitals' site files")
    from medpfl.demo.known import DEMOS

    with temporary_folder() as scratch:
        sites = scratch / "sites"
        DEMOS[file.demo](sites)
        for path in sites.glob("*.yaml"):  # public data, in a folder that goes with this command
            path.write_text(f"{path.read_text()}\nstorage: {{cache: ../prepared, cache_gb: 2}}\n")
        yield {path.stem: path for path in sorted(sites.glob("*.yaml"))}
