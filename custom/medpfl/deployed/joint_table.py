# SPDX-License-Identifier: Apache-2.0
"""How a joint model does at the hospitals, as a table."""

import re
from collections.abc import Sequence

from medpfl.methods.joint_study import Found
from medpfl.tasks.metrics.digits import digits


def table(found: Found, hospitals: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: test scores of the global, the hospital's own personal and the super model, and the share of
    cases served by the global model, the hospital's own and another's; below, the hospitals' unweighted mean and the
    mean over all cases."""
    every = [value for line in found.lines for value in (line.global_, line.own, line.super_)]
    d = 1 + digits(every)
    head = ["hospital", "cases", "global", "personal", "super", "by global", "by own", "by others"]
    rows = []
    for line in found.lines:
        own = line.served[1 + hospitals.index(line.hospital)] if line.hospital in hospitals else 0
        shares = (line.served[0], own, sum(line.served[1:]) - own)
        rows.append([
            line.hospital if line.hospital in hospitals else f"{line.hospital} (not in training)", str(line.cases),
            *(_text(value, d) for value in (line.global_, line.own, line.super_)),
            *(f"{count / line.cases:.0%}" for count in shares),
        ])  # fmt: skip
    trained = [line for line in found.lines if line.hospital in hospitals]
    for title, weights in (("client average", [1] * len(trained)), ("all cases", [line.cases for line in trained])):
        columns = ([getattr(line, name) for line in trained] for name in ("global_", "own", "super_"))
        means = [_text(_mean(column, weights), d) for column in columns]
        rows.append([title, str(sum(line.cases for line in trained)), *means, "", "", ""])
    return head, rows


def _mean(values: list[float | None], weights: list[int]) -> float | None:
    if not values or any(value is None for value in values):
        return None
    return sum(w * v for w, v in zip(weights, values, strict=True) if v is not None) / sum(weights)


def _text(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals}f}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table as Markdown, all columns but the first aligned to the right."""
    first, *rest = [[_as_it_is(cell) for cell in line] for line in (head, *rows)]
    lines = [first, ["---", *["---:"] * (len(head) - 1)], *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _as_it_is(cell: str) -> str:
    """A name in which Markdown would see the end of a cell or a tag."""
    return re.sub(r"([\\|]|<(?=[A-Za-z/!?]))", r"\\\1", " ".join(cell.splitlines()))
