# SPDX-License-Identifier: Apache-2.0
"""Comparisons whose runs are done in the test's own process, by the worker's own function."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from medpfl.compare.collect import collect
from medpfl.compare.file import load_comparison
from medpfl.compare.orders import Order
from medpfl.compare.plan import Plan, decide, make_plan
from medpfl.compare.results import Results
from medpfl.compare.runner import finished, part_of
from medpfl.compare.runs import Run
from medpfl.compare.worker import ORDER, run, work

FILE: dict[str, Any] = {
    "name": "small",
    "task": {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood", "hidden": [4]}},
    "rounds": 2,
    "seeds": [0],
    "steps": 5,
    "lr": 0.05,
    "finetune": 1,
    "methods": {},
}
SOFT: dict[str, Any] = {"path": "medpfl.methods.softpull.SoftPull"}


def write_file(folder: Path, **changes: Any) -> Path:
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return path


def plan_of(folder: Path, sites: dict[str, Path], **changes: Any) -> Plan:
    return make_plan(load_comparison(write_file(folder, **changes)), sites)


def do(runs: Iterable[Run], sites: dict[str, Path], results: Path) -> None:
    """What the runner has a process do for each run that is not finished."""
    for each in runs:
        if not finished(results, each):
            part = part_of(results, each)
            part.mkdir(parents=True, exist_ok=True)
            order = each.order.model_copy(update={"site_files": {site: str(path) for site, path in sites.items()}})
            (part / ORDER).write_text(order.model_dump_json())
            work(part, Order, run)


def compared(folder: Path, sites: dict[str, Path], **changes: Any) -> tuple[Plan, Results]:
    """The whole comparison, into ``folder``/results; its plan and what results.json holds."""
    plan, results = plan_of(folder, sites, **changes), folder / "results"
    if plan.searches:
        do((run for search in plan.searches for runs in search.runs for run in runs), sites, results)
        plan = decide(plan, results)
    do(plan.runs, sites, results)
    return plan, collect(plan, results, {})
