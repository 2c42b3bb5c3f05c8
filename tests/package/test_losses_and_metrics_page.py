# SPDX-License-Identifier: Apache-2.0
"""docs/losses-and-metrics.md says what the code has."""

import dataclasses
import math
import re
from pathlib import Path

from medpfl.data.target import Target
from medpfl.tasks import MultiLabel, Regression, Segmentation, Survival, Tabular, losses
from medpfl.tasks.contract import Task

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "losses-and-metrics.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """The table's rows under a heading, without its own heading."""
    table = re.search(rf"^## {title}\n.*?\n(\|.*?)\n\n", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert table
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]


def test_every_loss_is_there_with_its_arguments() -> None:
    said = {name.strip("`"): (answers, re.findall(r"`(\w+)`", given)) for name, answers, given, _ in rows("Losses")}
    words = {Target.MASK: "masks", Target.CLASS: "classes", Target.LABELS: "labels"}
    there = {}
    for name in losses.__all__:
        kind = getattr(losses, name)
        if kind is not losses.Loss:
            answers = " and ".join(sorted((words[target] for target in kind.answers), reverse=True))
            there[name] = (answers, [field.name for field in dataclasses.fields(kind) if field.init])
    assert said == there


def test_every_metric_is_there_with_its_direction_unit_and_range() -> None:
    there = []
    tasks: dict[str, Task] = {
        "masks": Segmentation("organ"),
        "classes": Tabular("blood"),
        "labels": MultiLabel(dataset="chest"),
        "numbers": Regression(dataset="stays"),
        "times": Survival(dataset="ward", horizons=(1.0,)),
    }
    for answers, task in tasks.items():
        for metric in (*task.metrics, *task.offered):
            least, most = metric.range
            span = f"{least:g} to {most:g}" if math.isfinite(most) else f"{least:g} and more"
            span = span if math.isfinite(least) else f"up to {most:g}"
            always = "yes" if metric.name in {one.name for one in task.metrics} else "no"
            there.append([f"`{metric.name}`", answers, always, metric.direction, metric.unit, span])
    assert [row[:-1] for row in rows("Metrics")] == there
