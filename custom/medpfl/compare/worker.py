# SPDX-License-Identifier: Apache-2.0
"""One run in a process of its own: ``python -m medpfl.compare.worker FOLDER``, with FOLDER/order.json.

The run works in ``<digest>.part`` and the folder gets its final name when everything is written: what is called
``<digest>`` is finished. A run that was killed goes on after its last finished round.
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, TypeVar

import numpy as np
from pydantic import TypeAdapter

from medpfl import store
from medpfl.compare.data import Read, reader, split_digest
from medpfl.compare.entries import initial_everywhere
from medpfl.compare.file import BEFORE_MEAN, FEDAVG, FINE_TUNED, LOCAL, POOLED
from medpfl.compare.orders import FoldOrder, Handed, Order
from medpfl.compare.patients import Kept
from medpfl.compare.pooled import train_pooled
from medpfl.compare.processes import FAILURE, RESULT
from medpfl.compare.run_results import AnyRun, Bins, Initial, ModelRow, Rows, SearchRun, SuperRow, TrainedRun, UnseenRun
from medpfl.compare.runs import code_of, job_of, rebuild
from medpfl.compare.unseen import SUPER, served, super_model
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.data.samples import SiteData
from medpfl.deployed.evaluate import write_text
from medpfl.deployed.model_file import Deployed, load_deployed
from medpfl.deployed.predict import evaluate_on_all
from medpfl.results.differences import sdwd_of_slots
from medpfl.results.files import LINES, json_of, parse, read_lines, read_mixing, read_traffic, read_training
from medpfl.results.schema import (
    Direction,
    FinalLine,
    Scores,
    TrainingLine,
    TrainingSummary,
    ValidationLine,
    number,
)
from medpfl.rounds.held_alike import common_start, read_common
from medpfl.rounds.server.joint import makes_joint
from medpfl.rounds.server.quorum import QuorumLost
from medpfl.rounds.simulate import simulate
from medpfl.tasks.contract import Evaluation, Task
from medpfl.tasks.metrics.calibration import reliability

ORDER = "order.json"
PROGRESS = f"results/{LINES}"
Told = TypeVar("Told", Order, FoldOrder)
_WAYS: tuple[Direction, Direction] = ("to_site", "from_site")


def work(folder: Path, kind: type[Told], run: Callable[[Told, Path], AnyRun]) -> None:
    """Do the run that ``folder``/order.json describes, and give the folder its final name.

    Args:
        kind: of the order.
        run: does it, given the order and the folder; what run.json holds.

    Raises:
        MedPFLError: as the hospitals, the server and the fairness checks raise them.
    """
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker that outlived its parent is waited for
        if folder.exists():
            store.sweep(folder)
            path = folder / ORDER
            result = run(parse(TypeAdapter(kind), path.read_text(encoding="utf-8"), path), folder)
            shutil.rmtree(folder / "home" / "server", ignore_errors=True)
            for state in folder.glob("home/*/*/state"):
                shutil.rmtree(state)
            (folder / FAILURE).unlink(missing_ok=True)
            write_text(folder / RESULT, json.dumps(json_of(result), indent=1))
            final = folder.with_name(folder.name.removesuffix(".part"))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(folder, final)


class _Said(TypedDict):
    """What every kind of run says of itself."""

    seed: int
    split: int | None
    without: str | None
    method: str
    initial: Initial


def check_code(order: Handed, here: str) -> None:
    """Refuse to do a run with other code than it is called by: its method was changed since the runs were planned, or
    this machine of a cluster has another copy.

    Args:
        here: digest of the code in this process.

    Raises:
        ConfigError: it is another one.
    """
    if here != order.code:
        raise ConfigError(
            "the code of the method, the task or MedPFL is not the one that this run was planned with: it was changed "
            "since, or is another one on this machine; start the same command again"
        )


def run(order: Order, folder: Path) -> SearchRun | TrainedRun | UnseenRun:
    """Train, choose by validation, test; what run.json holds."""
    entry, task = rebuild(order)
    check_code(order, code_of(order, entry.method))
    read = reader(order.split)
    files = {site: Path(path) for site, path in order.site_files.items()}
    data = {site: task.load(read(path, site)) for site, path in files.items()}
    for site, found in data.items():
        if split_digest(found) != order.splits[site]:
            raise ConfigError(f"{site}'s data or split changed while the comparison was running; start it again")
        common = read_common(entry.method.at(site), task, read(files[site], site), found.input_shape, found)
        if common.marks() != order.held.get(site, {}):
            raise ConfigError(
                f"{site}'s checkpoints or public data changed while the comparison was running; start it again"
            )
    start = common_start(entry.method.start, {site: read(path, site) for site, path in files.items()})
    taking_part = {site: found for site, found in sorted(data.items()) if site != order.without}
    roster = tuple(taking_part)
    said: _Said = {
        "seed": order.seed,
        "split": order.split,
        "without": order.without,
        "method": order.name,
        "initial": initial_everywhere(entry, task, taking_part, roster, order.seed, start),
    }
    job = job_of(entry, task, order, len(roster))
    test = not order.searching
    lines = None
    try:
        if order.pooled:
            coordinator, lines = train_pooled(job, taking_part, files[roster[0]], folder, test)
        elif not order.trained:
            there = {site: files[site] for site in roster}
            coordinator = simulate(job, there, folder / "results", folder / "home", read=read, test=test)
    except QuorumLost as error:
        if test:
            raise
        return SearchRun(**said, score=None, reason=str(error))  # such arguments cannot be chosen
    if not test:
        best = coordinator.best.get(next(iter(entry.method.deploys)))
        return SearchRun(**said, score=best.score if best else None, reason=None)
    summary = read_training(folder / "results")
    lines = lines or summary.test

    def label(model: str) -> str:
        return _label(entry.name, model, summary.personalised)

    if order.without:
        there = {site: files[site] for site in roster}
        reached = served(folder / "results", folder / "home", there, data[order.without], read)
        return UnseenRun(**said, rows={label(model): row for model, row in reached.items()})
    models = dict.fromkeys(line.model for line in lines)
    rows: dict[str, SuperRow | ModelRow] = {
        label(model): _row(model, task, folder, data, lines, summary) for model in models
    }
    kept = Kept(task)
    for model in models:
        for site, found in data.items():
            kept.add(label(model), site, _best(folder, site, model), found)
    kept.write(folder)
    if makes_joint(summary):
        rows[label(SUPER)] = _super_row(task, folder, data, files, read, job.settings.rounds)
    return TrainedRun(
        **said,
        rows=rows,
        bytes=_bytes(folder, bool(entry.codecs)),
        ratio=_ratio(folder) if entry.codecs else None,
        sdwd=sdwd_of_slots(folder / "results", summary.slots),
        seconds=_seconds(folder),
        mixing=_mixing(folder),
        privacy=summary.privacy,
        events=summary.events,
    )


def _row(
    model: str,
    task: Task,
    folder: Path,
    data: dict[str, SiteData],
    lines: list[FinalLine],
    summary: TrainingSummary,
) -> ModelRow:
    """Of one deployed model: its scores, its learning curve, calibration, and its test on every hospital's data."""
    tested: dict[str, dict[str, Scores]] = {}
    for line in lines:
        if line.model == model:
            tested.setdefault(line.choice, {})[line.site] = line.metrics
    best = summary.best.get(model)
    cross, together, calibration, alike = {}, {}, {}, []
    for site in data:
        deployed = _best(folder, site, model)
        found, everybody = evaluate_on_all(deployed, data, "test")
        together[site] = {name: number(value) for name, value in everybody.metrics.items()}
        cross[site] = {other: number(each.metrics[task.score]) for other, each in found.items()}
        calibration[site] = _calibration(deployed, found[site])
        alike += [site] if found[site].one_answer else []
    return ModelRow(
        model=model,
        best_round=best.round if best else None,
        best=tested.get("best", {}),
        last=tested.get("last", {}),
        curve=_curve(folder, model, task.score),
        scored=summary.scored.get(model),
        cross=cross,
        together=together,
        calibration=calibration,
        one_answer=alike,
    )


def _super_row(
    task: Task, folder: Path, data: dict[str, SiteData], files: dict[str, Path], read: Read, rounds: int
) -> SuperRow:
    """Of the super model that the server can put together: the last round's, the same for every hospital."""
    made, found = super_model(folder / "results", files, read)
    path = folder / "results" / "super.safetensors"
    made.write(path, found)
    each, everybody = evaluate_on_all(load_deployed(path), data, "test")
    tested = {site: {name: number(value) for name, value in one.metrics.items()} for site, one in each.items()}
    scores = {site: metrics[task.score] for site, metrics in tested.items()}
    together = {name: number(value) for name, value in everybody.metrics.items()}
    labels = made.method.labels
    return SuperRow(
        model=SUPER,
        best_round=rounds,
        best=tested,
        last=tested,
        curve=[],
        cross=dict.fromkeys(data, scores),
        together=dict.fromkeys(data, together),
        calibration=dict.fromkeys(data),
        gamma=found.gamma,
        served={line.hospital: dict(zip(labels, line.served, strict=True)) for line in found.lines},
    )


def _best(folder: Path, site: str, model: str) -> Deployed:
    return load_deployed(folder / "home" / site / "compared" / "models" / f"{model}-best.safetensors")


def _calibration(deployed: Deployed, found: Evaluation) -> Bins | None:
    """Calibration at the model's own hospital, with the bins that a reliability plot shows."""
    history = deployed.meta.history
    if history is None or history.calibration is None:
        return None
    top = np.array([case["probability"] for case in found.cases])
    right = np.array([case["predicted"] == case["class"] for case in found.cases])
    share, hits, total = reliability(top, right)
    bins = [list(one) for one in zip(share.tolist(), hits.tolist(), total.tolist(), strict=True)]
    return Bins(ece=history.calibration.ece, brier=history.calibration.brier, bins=bins)


def _label(name: str, model: str, personalised: str) -> str:
    if name == FEDAVG:
        return {"fedavg_finetuned": FINE_TUNED, "fedavg_before_mean": BEFORE_MEAN}.get(model, FEDAVG)
    return name if name in (LOCAL, POOLED) or model == personalised else f"{name} ({model})"


def _curve(folder: Path, model: str, score: str) -> list[float | None]:
    """Mean validation score of the hospitals after each round; None where it has none."""
    lines = [
        line for line in read_lines(folder / "results") if isinstance(line, ValidationLine) and line.model == model
    ]
    found = {line.round: line.metrics[score] for line in lines if line.site == "mean"}
    rounds = sorted({line.round for line in lines if line.round})  # 0: before the first
    return [found.get(number) for number in rounds] if any(value is not None for value in found.values()) else []


def _bytes(folder: Path, coded: bool) -> dict[Direction, int]:
    """Bytes that one hospital is sent and sends in a round: the largest, where they differ; with codecs, the mean."""
    traffic = read_traffic(folder / "results")
    found = {way: [line.encoded for line in traffic if line.direction == way] for way in _WAYS}
    return {
        way: round(sum(given) / len(given)) if coded and given else max(given, default=0)
        for way, given in found.items()
    }


def _ratio(folder: Path) -> dict[Direction, float]:
    """How many times fewer bytes travelled than the tensors have, over the whole run."""
    ratios: dict[Direction, float] = {}
    for way in _WAYS:
        lines = [line for line in read_traffic(folder / "results") if line.direction == way]
        ratios[way] = round(sum(line.raw for line in lines) / max(sum(line.encoded for line in lines), 1), 2)
    return ratios


def _seconds(folder: Path) -> float:
    """Median seconds that one hospital worked in a round, without the first round where there are others."""
    lines = [line for line in read_lines(folder / "results") if isinstance(line, TrainingLine)]
    last = max(line.round for line in lines)
    return float(np.median([line.seconds for line in lines if line.round > 1 or last == 1]))


def _mixing(folder: Path) -> dict[str, Rows]:
    """The last round's matrix of every slot that has one."""
    mixing = read_mixing(folder / "results")
    last = {name.rsplit("/", 1)[0]: name for name in sorted(mixing)}
    return {slot: np.round(mixing[name], 6).tolist() for slot, name in last.items()}


def main(folder: Path) -> int:
    """``carry_out`` a run of a comparison."""
    return carry_out(folder, Order, run)


def carry_out(folder: Path, kind: type[Told], run: Callable[[Told, Path], AnyRun]) -> int:
    """``work``; exit code 1 and a sentence in failure.txt where the run could not be done."""
    try:
        work(folder, kind, run)
    except MedPFLError as error:
        write_text(folder / FAILURE, str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
