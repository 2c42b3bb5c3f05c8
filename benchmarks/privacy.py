# SPDX-License-Identifier: Apache-2.0
"""``benchmarks privacy``: what differential privacy costs four hospitals with heart patients, and whether joining under
it is better than training alone.

Logistic regression on FLamby's split of the four UCI heart-disease centres; 10 rounds of 10 steps, plain gradient
descent with a learning rate of 0.5, lots (or batches) of 16 cases, all of it set once and not tuned for any epsilon.
FedAvg and SoftPull (lam 0.5), each with DPSGD (records) and with ClippedNoise (updates) at the same epsilons, both
without noise, and Local, which sends nothing. The model of the last round counts: nothing is chosen on data.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from benchmarks.common import PlotOption, SeedsOption, machine, markdown, mean_sd, write_json
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mixer, SoftPull
from medpfl.demo.heart import HOSPITALS, write_heart
from medpfl.deployed.evaluate import write_text
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.local import Local
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.accountant import noise_for
from medpfl.privacy.contract import Privacy
from medpfl.privacy.noise import FIXED
from medpfl.results.files import read_summary
from medpfl.results.svg import legend_below, svg_text
from medpfl.results.tables import result_table
from medpfl.rounds.simulate import simulate
from medpfl.tasks.contract import Task
from medpfl.tasks.tabular import Tabular

Level = Literal["record", "update"]
DELTA = 1e-3
METHODS: dict[str, type[Method]] = {"FedAvg": FedAvg, "SoftPull": softpull.SoftPull}
NONE = "without noise"
TITLES = {"record": "single cases (DPSGD)", "update": "whole updates (ClippedNoise)"}


@dataclass(frozen=True)
class Study:
    """What is trained where; all of it holds for every arm.

    Attributes:
        write: writes the site files into a folder, from the data at a place (None: where the demo looks for them).
        lot: expected cases of a lot, or a batch's.
        clip: of update noise.
    """

    name: str
    hospitals: tuple[str, ...]
    write: Callable[[Path, Path | None], object]
    task: Task
    epsilons: tuple[float, ...]
    levels: tuple[Level, ...]
    rounds: int = 10
    steps: int = 10
    lot: int = 16
    lr: float = 0.5
    max_grad_norm: float = 1.0
    clip: float = 0.5

    def arms(self) -> Iterator[tuple[str, Method]]:
        training: dict[str, Any] = {
            "steps": self.steps, "batch_size": self.lot, "lr": self.lr, "optimizer": "sgd",
        }  # fmt: skip
        yield "Local", Local(**training)
        for name, kind in METHODS.items():
            yield f"{name}, {NONE}", kind(**training)
            for epsilon in self.epsilons:
                for level in self.levels:
                    yield name_of(name, level, epsilon), kind(privacy=self._noise(level, epsilon), **training)

    def _noise(self, level: Level, epsilon: float) -> Privacy:
        if level == "record":
            return DPSGD(target_epsilon=epsilon, max_grad_norm=self.max_grad_norm, delta=DELTA)
        noise = 2 * noise_for(epsilon, DELTA, 1.0, self.rounds)  # an update can change by twice the clip
        return ClippedNoise(clip=self.clip, noise_multiplier=noise, delta=DELTA)


HEART = Study(
    "heart",
    tuple(HOSPITALS),
    lambda folder, data: write_heart(folder, data, "flamby"),
    Tabular("heart"),
    (1.0, 2.0, 4.0, 8.0, 16.0),
    ("record", "update"),
)


def measure(
    data: Path | None,
    seeds: int,
    progress: Callable[[str], None],
    study: Study = HEART,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Test scores with ``seeds`` seeds from 0 (of weights, batches and noise).

    Args:
        data: where the study's data are.
        keep: is given what there is after every seed.

    Returns:
        By "method, level, epsilon": hospital to one score a seed, and the largest epsilon that a hospital spent.
    """
    if seeds < 1:
        raise MedPFLError(f"--seeds must be at least 1, got {seeds}")
    accuracy: dict[str, dict[str, list[float]]] = {}
    spent: dict[str, float] = {}
    about = {"rounds": study.rounds, "steps": study.steps, "lot": study.lot, "lr": study.lr,
             "max_grad_norm": study.max_grad_norm, "clip": study.clip}  # fmt: skip
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        sites = Path(scratch) / "sites"
        study.write(sites, data)
        for seed in range(seeds):
            for number, (name, method) in enumerate(study.arms()):
                found, cost = _run(study, method, seed, sites, Path(scratch) / f"{seed}-{number}")
                for site, value in found.items():
                    accuracy.setdefault(name, {}).setdefault(site, []).append(round(value, 6))
                spent[name] = max(spent.get(name, 0.0), round(cost, 3))
                progress(f"seed {seed}: {name} done")
            results = {"seeds": seed + 1, "delta": DELTA, "epsilons": list(study.epsilons), **about,
                       "accuracy": accuracy, "spent": spent}  # fmt: skip
            keep(results)
    return results


def name_of(method: str, level: str, epsilon: float) -> str:
    return f"{method}, {level}, {epsilon:g}"


def _run(study: Study, method: Method, seed: int, sites: Path, scratch: Path) -> tuple[dict[str, float], float]:
    """Score by hospital, and the largest epsilon that one of them has spent."""
    files = {site: sites / f"{site}.yaml" for site in study.hospitals}
    mixers: dict[str, Mixer] = {"model": SoftPull(0.5)} if isinstance(method, softpull.SoftPull) else {}
    settings = Settings(rounds=study.rounds, references=(), seed=seed, finetune=0)
    job = Job(study.name, len(files), settings, mixers, method, study.task)
    before = os.environ.get(FIXED)
    os.environ[FIXED] = str(seed)
    try:
        simulate(job, files, scratch / "results", scratch / "home")
    finally:
        if before is None:
            del os.environ[FIXED]
        else:
            os.environ[FIXED] = before
    summary = read_summary(scratch / "results")
    table = result_table(summary, "last")
    cost = max((one.epsilon for one in getattr(summary, "privacy", {}).values()), default=0.0)
    return dict(zip(table.sites, map(float, table.values[:, 0]), strict=True)), cost


def _means(rows: dict[str, list[float]]) -> list[float]:
    """Mean over the hospitals, seed by seed."""
    return [float(value) for value in np.mean(list(rows.values()), axis=0)]


def table_of(results: dict[str, Any], score: str = "accuracy") -> str:
    """Means over the hospitals and their standard deviations over the seeds, and every hospital's mean."""
    accuracy: dict[str, dict[str, list[float]]] = results["accuracy"]
    sites = list(accuracy["Local"])
    headings = ["method", "noise", "epsilon", "largest spent", "mean of the hospitals", *sites]
    rows = []
    for name, found in accuracy.items():
        method, level, epsilon = (*name.split(", "), "", "")[:3]
        cost = f"{results['spent'][name]:.2f}" if epsilon else ""
        each = [f"{np.mean(found[site]):.3f}" for site in sites]
        rows.append([method, level, epsilon, cost, mean_sd(_means(found)), *each])
    told = f"Test {score}, {results['seeds']} seeds; epsilon at delta {results['delta']:g}."
    return f"{told}\n\n{markdown(headings, rows)}"


def draw(results: dict[str, Any], path: Path, levels: Sequence[Level] = HEART.levels, score: str = "accuracy") -> None:
    """The score against epsilon, one picture a level; lines across: what costs nothing."""
    from matplotlib.figure import Figure

    accuracy = results["accuracy"]
    figure = Figure(figsize=(4.2 * max(len(levels), 1.2), 3.4), layout="constrained")
    axes = figure.subplots(1, len(levels), sharey=True, squeeze=False)[0]
    for axis, level in zip(axes, levels, strict=True):
        for method, colour in zip(METHODS, ("#1f77b4", "#d62728"), strict=True):
            values = [_means(accuracy[name_of(method, level, epsilon)]) for epsilon in results["epsilons"]]
            mean, spread = np.mean(values, axis=1), np.std(values, axis=1)
            axis.errorbar(results["epsilons"], mean, spread, color=colour, marker="o", capsize=3, label=method)
            free = float(np.mean(_means(accuracy[f"{method}, {NONE}"])))
            axis.axhline(free, color=colour, linestyle=":", linewidth=1, label=f"{method} {NONE}")
        alone = float(np.mean(_means(accuracy["Local"])))
        axis.axhline(alone, color="#333333", linestyle="--", linewidth=1, label="Local (sends nothing)")
        axis.set_xscale("log", base=2)
        axis.set_xticks(results["epsilons"], [f"{epsilon:g}" for epsilon in results["epsilons"]])
        axis.set_xlabel(f"epsilon at delta {results['delta']:g}")
        axis.set_title(TITLES[level], fontsize=10)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(f"test {score}, mean of {len(accuracy['Local'])} hospitals")
    legend_below(axes[-1], 8)
    write_text(path, svg_text(figure))


def command(
    data: Annotated[Path | None, typer.Option(help="Folder with the UCI processed.*.data files.")] = None,
    seeds: SeedsOption = 5,
    out: PlotOption = None,
) -> None:
    """Differential privacy on heart: accuracy against epsilon, beside training alone; with --out, a plot beside it."""
    facts = machine()
    results = measure(data, seeds, say)
    write_json(out, "privacy", facts, results)
    if out is not None:
        draw(results, out.with_suffix(".svg"))
    say(table_of(results))
