# SPDX-License-Identifier: Apache-2.0
"""``benchmarks best-round``: rules by which the round is taken whose models are deployed.

Every round of every run is scored on validation and on test cases, which no run of a user does: so it is known what a
rule that sees validation alone would have deployed. Arguments, networks and hospitals are those of the stored
comparisons; seeds are others, so that nothing is chosen by what they report.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.common import OutOption, machine, markdown, write_json
from medpfl.cli.terminal import say
from medpfl.compare.comparison import hospitals_of
from medpfl.compare.data import reader
from medpfl.compare.file import comparison_of
from medpfl.compare.plan import make_plan
from medpfl.compare.runs import Run, job_of, rebuild
from medpfl.core.errors import MedPFLError
from medpfl.data.target import Target
from medpfl.data.untrusted import load_yaml
from medpfl.deployed.evaluate import decide, evaluate, write_text
from medpfl.methods.contract import Method
from medpfl.results.line import MetricLine
from medpfl.rounds.hospital.scoring import Scoring
from medpfl.rounds.simulate import simulate

STORED = Path(__file__).resolve().parents[1] / "docs" / "results"
PATTERNS = ("FedAvg", "Auto", "FedBN", "Ditto", "APFL", "FedAP", "SoftPull", "CusFL", "FedSM")
IMAGES = ("FedAvg", "Auto", "FedBN", "Ditto", "APFL", "FedAP")
STUDIES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "feature-shift": ("scanner", PATTERNS, 5),
    "label-skew": ("case mix", PATTERNS, 5),
    "concept-shift": ("labelling rule", PATTERNS, 5),
    "quantity-skew": ("one tiny hospital", PATTERNS, 5),
    "none": ("nothing", PATTERNS, 5),
    "phantom": ("phantoms, Dice", PATTERNS, 2),
    "skin-diagnoses": ("seven skin diagnoses, a falling learning rate", IMAGES, 2),
}
"""Stored comparison to what it is called in the table, methods beside Local, and seeds."""
FIRST_SEED = 100
DEPLOYED = {"Local": "local", "FedAvg": "fedavg"}
"""Of a run its deployed model; of the others "personal"."""
Values = NDArray[np.float64]


def trailing(values: Values, count: int) -> Values:
    """Of each round the mean of it and those before it, ``count`` in all; -inf where there are not so many."""
    found = np.full(len(values), -np.inf)
    found[count - 1 :] = np.convolve(values, np.ones(count) / count, "valid")
    return found


LEAST_LOSS = "least loss"
RULES: dict[str, Callable[[Values, Values], int]] = {
    "best round": lambda score, loss: int(score.argmax()),
    "best mean of three rounds": lambda score, loss: int(trailing(score, 3).argmax()),
    "best mean of five": lambda score, loss: int(trailing(score, 5).argmax()),
    LEAST_LOSS: lambda score, loss: int(loss.argmin()),
    "last round": lambda score, loss: len(score) - 1,
}
"""What each takes, by the hospitals' mean validation score and mean loss of every round. The first is the product's."""
BEST = "the best by the test"


def measure(studies: list[str], runs: Path) -> dict[str, Any]:
    """What each rule's round scores on the test, run by run; finished runs are kept in ``runs``.

    Raises:
        MedPFLError: there is no such study.
    """
    found: dict[str, Any] = {}
    for study in studies:
        if study not in STUDIES:
            raise MedPFLError(f"--study: no study '{study}'; there are: {', '.join(STUDIES)}")
        _, methods, seeds = STUDIES[study]
        said = load_yaml(STORED / f"compare-{study}.yaml")
        entries = {**said["methods"], "Auto": {"path": "medpfl.methods.auto.Auto"}}
        said |= {"seeds": list(range(FIRST_SEED, FIRST_SEED + seeds)), "pooled": False}
        said["methods"] = {name: one for name, one in entries.items() if name in methods}
        file = comparison_of(said, study)
        with hospitals_of(file, None) as files:
            for run in make_plan(file, files).runs:
                kept = runs / f"{study}-{run.name}-{run.seed}.json"
                if not kept.exists():
                    write_text(kept, json.dumps(_scored(run, files)))
                history = json.loads(kept.read_text(encoding="utf-8"))
                found.setdefault(study, {}).setdefault(run.name, []).append(deployed(run.name, history))
    return {"found": found}


def _scored(run: Run, files: dict[str, Path]) -> dict[str, Any]:
    """Every round of one run, on both splits."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="medpfl-") as scratch, _both_splits() as lines:
        entry, task = rebuild(run.order)
        job, place = job_of(entry, task, run.order, len(files)), Path(scratch)
        simulate(job, files, place / "results", place / "home", read=reader(run.split), test=False)
    return {"score": task.score, "lines": lines}


@contextmanager
def _both_splits() -> Iterator[list[dict[str, Any]]]:
    """What hospitals score meanwhile, with their test split, too; what they send is the same."""
    found: list[dict[str, Any]] = []
    plain = Scoring.lines

    def lines(self: Scoring, methods: list[Method], round_number: int) -> list[MetricLine]:
        told = plain(self, methods, round_number)
        with torch.random.fork_rng(devices=[]):
            for method in methods:
                for name in method.deploys:
                    found.append({"model": name, "site": self.index, "round": round_number, **_of(self, method, name)})
        return told

    Scoring.lines = lines  # type: ignore[assignment,method-assign]
    try:
        yield found
    finally:
        Scoring.lines = plain  # type: ignore[method-assign]


def _of(scoring: Scoring, method: Method, name: str) -> dict[str, Any]:
    found = {}
    for split in ("validation", "test"):
        samples = scoring.data.splits[split]
        told = evaluate(method, name, scoring.models, scoring.task, samples, scoring.device)
        assert told is not None
        found[split] = {**told.metrics, "nll": None}
        if scoring.task.spec.target is Target.CLASS:
            answers = decide(method, name, scoring.models, scoring.task, samples, scoring.device)
            right = answers[range(len(samples)), samples.targets[:].long()]
            found[split]["nll"] = float(-right.double().clamp_min(1e-7).log().mean())
    return found


def deployed(name: str, history: Mapping[str, Any]) -> dict[str, float]:
    """The test score of each rule's round in a run of the method ``name``, mean of the hospitals; and of the round that
    is the best on the test, which nobody could take."""
    model = DEPLOYED.get(name, "personal")
    lines = [line for line in history["lines"] if line["model"] == model]
    shape = max(line["round"] for line in lines), 1 + max(line["site"] for line in lines)
    score, loss, test = (np.full(shape, np.nan) for _ in range(3))
    for line in lines:
        place = line["round"] - 1, line["site"]
        score[place] = line["validation"][history["score"]]
        loss[place] = line["validation"]["nll"] if line["validation"]["nll"] is not None else np.nan
        test[place] = line["test"][history["score"]]
    means = test.mean(axis=1)
    rules = {rule: take for rule, take in RULES.items() if rule != LEAST_LOSS or np.isfinite(loss).all()}
    taken = {rule: means[take(score.mean(axis=1), loss.mean(axis=1))] for rule, take in rules.items()}
    return {rule: round(float(value), 6) for rule, value in {**taken, BEST: means.max()}.items()}


def table_of(results: dict[str, Any]) -> str:
    """Of each study the mean test score by the product's rule, and by how much each other one is above it."""
    first, *others = [*RULES, BEST]
    rows = []
    for study, methods in results["found"].items():
        runs = [run for each in methods.values() for run in each]
        cells = [STUDIES[study][0], str(len(runs)), f"{np.mean([run[first] for run in runs]):.3f}"]
        rows.append([*cells, *(_gain(runs, rule, first) for rule in others)])
    by_method = []
    for name in dict.fromkeys(name for methods in results["found"].values() for name in methods):
        runs = [run for methods in results["found"].values() for run in methods.get(name, [])]
        by_method.append([name, str(len(runs)), *(_gain(runs, rule, first) for rule in others)])
    return (
        markdown(["hospitals differ in", "runs", first, *others], rows)
        + "\n\n"
        + markdown(["method, all studies", "runs", *others], by_method)
    )


def _gain(runs: list[dict[str, float]], rule: str, first: str) -> str:
    """The mean difference, and its standard error over the runs that have both."""
    differences = [run[rule] - run[first] for run in runs if rule in run]
    if len(differences) < 2:
        return "–"
    return f"{np.mean(differences):+.4f} ({np.std(differences, ddof=1) / len(differences) ** 0.5:.4f})"


def command(
    runs: Annotated[Path, typer.Option(help="Folder for the runs; finished ones in it are not repeated.")],
    study: Annotated[list[str] | None, typer.Option(help="One of the studies; default: all.")] = None,
    out: OutOption = None,
) -> None:
    """Rules that take the round to be deployed, each judged by test scores of every round (about two hours)."""
    facts = machine()
    results = measure(study or list(STUDIES), runs)
    write_json(out, "best_round", facts, results)
    say(table_of(results))
