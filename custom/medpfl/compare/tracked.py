# SPDX-License-Identifier: Apache-2.0
"""A comparison in MLflow: an experiment a comparison, and in it a run for each of its runs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import JsonValue, TypeAdapter

from medpfl.compare.aggregate import of_hospitals
from medpfl.compare.counted import Counted, Pair, counted_in
from medpfl.compare.orders import Order
from medpfl.compare.processes import RESULT
from medpfl.compare.results import Results, RunRow
from medpfl.compare.run_results import ModelRow, TrainedRun
from medpfl.compare.worker import ORDER
from medpfl.core.errors import MedPFLError
from medpfl.results.files import parse
from medpfl.results.trackers.mlflow import Store

Number = tuple[str, float, int]
"""Name, value, round."""


def write_comparison(content: Results, folder: Path, address: str) -> int:
    """Write the comparison's finished runs, except those that are there already; returns how many were written.

    Runs without a hospital (``unseen``) are left out: they have no test of their own.

    Args:
        folder: the comparison's folder, with ``runs/<digest>``.
        address: as MLflow names it, ``http://...`` or ``sqlite:///file.db``.

    Raises:
        MedPFLError: a run's files cannot be read, or MLflow cannot be reached or does not take them.
    """
    store = Store(address, content.comparison)
    written, counted = 0, counted_in(content)
    for row in content.runs:
        if row.without is None and not store.has("run", _name_of(row)):
            order, done = _read(folder / "runs" / row.digest)
            tags = {"comparison": content.comparison, "run": _name_of(row)}
            run = store.begin(_title(row), tags, dict(parameters(order, row)))
            store.write(run, numbers(done, row, content.score, counted), _title(row))
            store.end(run)
            written += 1
    return written


def parameters(order: Order, row: RunRow) -> Iterator[tuple[str, str]]:
    """What the run was told: the method, the server's components, the task and the rounds, with all arguments."""
    yield "method", row.method
    yield "seed", str(row.seed)
    yield "split", "as declared" if row.split is None else str(row.split)
    yield "rounds", str(order.rounds)
    yield from _said("method.class", "method", order.method)
    yield from _said("task", "task", order.task)
    for slot, component in order.slots.items():
        yield from _said(f"slot.{slot}", f"slot.{slot}", component)
    for way, codec in (order.codecs or {}).items():
        yield from _said(f"codec.{way}", f"codec.{way}", codec or {"path": "none"})


def numbers(done: TrainedRun, row: RunRow, score: str, counted: Counted) -> Iterator[Number]:
    """Every model's validation curve, and its tests at the best and at the last round: by hospital, and their mean, of
    those that are ``counted``."""
    for label, model in done.rows.items():
        shown = label.replace(done.method, row.method, 1)  # the same run may have been made under another name
        curve = [(value, at) for at, value in enumerate(model.curve, 1) if value is not None]
        yield from ((f"validation/{shown}/{score}", value, at) for value, at in curve)
        yield from _tests(shown, model, (row.split, row.seed), counted)
    yield "train/seconds", done.seconds, 0
    yield from ((f"bytes/{way}", float(count), 0) for way, count in done.bytes.items())


def _tests(label: str, model: ModelRow, pair: Pair, counted: Counted) -> Iterator[Number]:
    last = len(model.curve)
    for choice, tests, at in (("best", model.best, model.best_round or last), ("last", model.last, last)):
        for metric in dict.fromkeys(metric for scores in tests.values() for metric in scores):
            found = {site: scores.get(metric) for site, scores in tests.items()}
            known = {site: value for site, value in found.items() if value is not None}
            name = f"test/{choice}/{label}/{metric}"
            yield from ((f"{name}/{site}", value, at) for site, value in known.items())
            mean = of_hospitals(
                np.array([[found[site] for site in counted.sites]], dtype=float), counted.of(metric, [pair])
            )
            if np.isfinite(mean[0]):
                yield name, float(mean[0]), at


def _said(name: str, prefix: str, component: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    """A component's class, and its arguments."""
    yield name, str(component["path"])
    given = component.get("args")
    for argument, value in (given if isinstance(given, dict) else {}).items():
        yield f"{prefix}.{argument}", value if isinstance(value, str) else json.dumps(value)


def _name_of(row: RunRow) -> str:
    """What tells a run from all others: another result has another digest."""
    return f"{row.digest} {row.method} {row.split}"


def _title(row: RunRow) -> str:
    return " ".join([row.method, *([] if row.split is None else [f"split {row.split}"]), f"seed {row.seed}"])


def _read(folder: Path) -> tuple[Order, TrainedRun]:
    try:
        order, done = ((folder / name).read_text(encoding="utf-8") for name in (ORDER, RESULT))
    except (OSError, UnicodeDecodeError) as error:
        raise MedPFLError(f"{folder} cannot be read: {error}; MLflow gets what a run's own folder holds") from error
    return parse(TypeAdapter(Order), order, folder / ORDER), parse(TypeAdapter(TrainedRun), done, folder / RESULT)
