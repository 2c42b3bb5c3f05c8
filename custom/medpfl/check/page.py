# SPDX-License-Identifier: Apache-2.0
"""The data check as one self-contained HTML page. It shows patients' data: it is written for its owner's eyes only."""

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, Template, select_autoescape
from numpy.typing import NDArray

import medpfl
from medpfl.check.check import Report
from medpfl.check.inspection import Inspection, Shown
from medpfl.check.pictures import COLOURS
from medpfl.check.trial import size
from medpfl.core.errors import DataError
from medpfl.data.columns import Column
from medpfl.data.numbers import for_people

BINS = 32
TEXTS = 8  # categories shown of a column
CHANNELS = 12  # histograms of an image's or recording's channels
SHAPES = 8  # different shapes, and spacings, shown


@cache
def _template() -> Template:
    environment = Environment(loader=PackageLoader("medpfl.check", "."), autoescape=select_autoescape())
    return environment.get_template("page.html")


def check_place(path: Path) -> None:
    """Before the data are read, which may take hours.

    Raises:
        DataError: the page could not be written there.
    """
    _write(path, "", lambda temporary: temporary.unlink())


def write_page(report: Report, path: Path) -> Path:
    """Write the page, readable by its owner only; a reader sees the old page or the new one.

    Raises:
        DataError: it cannot be written.
    """
    text = _template().render(
        report=report,
        datasets=[_dataset(inspection) for inspection in report.inspections],
        version=medpfl.__version__,
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        size=size,
    )
    _write(path, text, lambda temporary: temporary.replace(path))
    return path


def _write(path: Path, text: str, then: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))  # a path may be in no UTF-8
        then(temporary)
    except OSError as error:
        with suppress(OSError):  # what cannot be written has nothing to remove, and a read-only disk says so again
            temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write the page {path}: {error.strerror}; name another with --page") from error


def _dataset(inspection: Inspection) -> dict[str, object]:
    splits = {split: counts for split, counts in inspection.splits.items() if counts.listed}
    maps = any(counts.voxels for counts in splits.values())
    most = max((max(counts.classes, default=0) / max(1, counts.cases) for counts in splits.values()), default=0)
    classes = []
    for index, name in enumerate(inspection.class_names):
        cells = []
        for counts in splits.values():
            count = counts.classes[index] if counts.classes else 0
            share = counts.voxels[index] / max(1, sum(counts.voxels)) if counts.voxels else count / max(1, counts.cases)
            width = 100 * count / max(1, counts.cases) / max(most, 1e-9)
            cells.append({"count": count, "share": _percent(share) if count else "", "width": round(width, 1)})
        colour = COLOURS[(index - 1) % len(COLOURS)] if maps and index else ""
        classes.append({"name": name, "cells": cells, "colour": colour})
    return {
        "found": inspection,
        "splits": splits,
        "maps": maps,
        "classes": classes,
        "channels": _channels(inspection),
        "columns": [_column(column) for column in inspection.columns],
        "shapes": [(" x ".join(map(str, s)), n) for s, n in inspection.shapes.most_common(SHAPES)],
        "more_shapes": max(0, len(inspection.shapes) - SHAPES),
        "spacings": [(" x ".join(f"{v:g}" for v in s), n) for s, n in inspection.spacings.most_common(SHAPES)],
        "more_spacings": max(0, len(inspection.spacings) - SHAPES),
        "pictures": [(split, _of_split(inspection, split)) for split in splits],
    }


def _of_split(inspection: Inspection, split: str) -> list[Shown]:
    """The split's pictures, class by class."""
    shown = [shown for shown in inspection.pictures if shown.split == split]
    return sorted(shown, key=lambda one: inspection.class_names.index(one.label) if one.label else 0)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= 0.001 else f"{share:.2g}".replace("e-0", "e-")


def _channels(inspection: Inspection) -> list[dict[str, object]]:
    count = max((len(counts.channels) for counts in inspection.splits.values()), default=0)
    shown = []
    for place in range(count):
        parts = {s: c.channels[place] for s, c in inspection.splits.items() if len(c.channels) > place}
        samples = {split: channel.sample() for split, channel in parts.items()}
        rows = []
        for split, channel in parts.items():
            known = samples[split]
            percentiles = np.percentile(known, (1, 50, 99)) if len(known) else np.full(3, np.nan)
            cells = (channel.low, *percentiles, channel.high, channel.mean)
            rows.append((split, [_number(value) for value in cells], channel.missing))
        drawing = _histogram(samples, root=True) if place < CHANNELS else None
        shown.append({"number": place + 1, "rows": rows, "histogram": drawing})
    return shown


def _column(column: Column) -> dict[str, object]:
    numbers = column.numbers()
    texts = column.texts.most_common(TEXTS) if column.role not in ("number", "group") else []
    most = max((count for _, count in texts), default=1)
    return {
        "name": column.name,
        "role": column.role,
        "missing": column.missing,
        "rows": column.rows,
        "range": (_number(numbers.min()), _number(numbers.mean()), _number(numbers.max())) if len(numbers) else None,
        "different": len(np.unique(numbers)) if len(numbers) else len(column.texts),
        "texts": [(text, count, round(100 * count / most)) for text, count in texts],
        "more": len(column.texts) - len(texts),
        "histogram": _histogram(column.values) if len(numbers) else None,
    }


def _number(value: float) -> str:
    return "–" if not np.isfinite(value) else for_people(value)


def _histogram(values: dict[str, NDArray[Any]], root: bool = False) -> dict[str, object] | None:
    """Outlines of each split's histogram in a box of 100 x 40: heights are shares of the split (``root``: their square
    roots, or an image's background would hide all else), the outer bins hold all outside the middle 99 percent."""
    filled = {split: known for split, known in values.items() if len(known)}
    if not filled:
        return None
    together = np.concatenate(list(filled.values())).astype(np.float64)
    low, high = np.percentile(together, (0.5, 99.5))
    if len(np.unique(together)) <= BINS:
        low, high = together.min(), together.max()
    if high <= low:
        low, high = low - 0.5, high + 0.5
    bins = int(np.clip(2 * np.sqrt(min(map(len, filled.values()))), 8, BINS))
    edges = np.linspace(low, high, bins + 1)
    shares = {s: np.histogram(np.clip(known, low, high), edges)[0] / len(known) for s, known in filled.items()}
    heights = {split: np.sqrt(share) if root else share for split, share in shares.items()}
    top = max(float(height.max()) for height in heights.values())
    paths = {}
    for split, height in heights.items():
        corners = [(index + side, value) for index, value in enumerate(height.tolist()) for side in (0, 1)]
        steps = [f"{100 * index / bins:.2f},{40 - 38 * value / top:.1f}" for index, value in corners]
        paths[split] = f"0,40 {' '.join(steps)} 100,40"
    return {"low": _number(low), "high": _number(high), "paths": paths}
