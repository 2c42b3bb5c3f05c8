# SPDX-License-Identifier: Apache-2.0
"""Membership inference: was this patient in that hospital's training data?

Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership Inference Attacks From First Principles", S&P 2022, as there
evaluated: of every hospital's candidates each run trains on a random half, and every run is attacked with all others as
the attacker's shadow models (with and without the candidate). The loss attack (Yeom et al., CSF 2018) thresholds the
model's confidence in the candidate's true class alone.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.attacked import (
    DATASET,
    Federation,
    Flat,
    Pools,
    Progress,
    inputs_of,
    loaded,
    noise_seed,
    pools,
    write_hospital,
)
from benchmarks.common import markdown, mean_sd
from medpfl.demo.patterns import CLASSES, SIDE
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedper import FedPer
from medpfl.methods.softpull import SoftPull
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.contract import Privacy
from medpfl.tasks import Classification

NETWORK = Flat((32,))
ROUNDS, EPOCHS, BATCH, RATE, DELTA = 3, 5, 8, 0.2, 1e-3
SITES = 2
METHODS: dict[str, type[Method]] = {"FedAvg": FedAvg, "SoftPull": SoftPull, "FedPer": FedPer}
ARMS: dict[str, Privacy | None] = {
    "none": None,
    "ClippedNoise, little": ClippedNoise(clip=2.0, noise_multiplier=0.01, delta=DELTA),
    "ClippedNoise, much": ClippedNoise(clip=2.0, noise_multiplier=0.1, delta=DELTA),
    "DPSGD, little": DPSGD(max_grad_norm=1.0, noise_multiplier=0.3, delta=DELTA),
    "DPSGD, epsilon 8": DPSGD(max_grad_norm=1.0, target_epsilon=8.0, delta=DELTA),
}
VIEWS = ("sent", "kept")
"""What the server gets from a hospital in the last round, and the model with which the hospital ends."""
LEAST_RUNS = 4
FALSE = 0.01
Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Candidates:
    """The images of all hospitals, one hospital after another."""

    inputs: Tensor
    labels: Tensor
    site: NDArray[np.int64]


def measure(
    runs: int, progress: Progress, arms: Mapping[str, Privacy | None] = ARMS, data: Pools | None = None
) -> dict[str, Any]:
    """Every method and arm, ``runs`` (even, at least 4) times.

    Args:
        data: the hospitals' images; None: generated ones.

    Returns:
        By "method, arm, view": AUC of both attacks in each run, the true-positive rate at 1 % false positives over all
        runs, accuracy in each run; by "method, arm" the largest epsilon.
    """
    found: dict[str, dict[str, Any]] = {}
    spent: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        data = data or pools(Path(scratch) / "pool", SITES, 0)
        count = len(data[0]["train_images"])
        rng = np.random.default_rng(0)
        member = np.stack([rng.permutation(runs) < runs // 2 for _ in range(SITES * count)], axis=1)
        for method in METHODS:
            for arm, privacy in arms.items():
                folder = Path(scratch) / f"{method} {arm}"
                made = [_run(method, privacy, data, member[run], run, folder / str(run)) for run in range(runs)]
                for view in VIEWS:
                    values = np.stack([one.confidence[view] for one in made])
                    accuracy = [round(one.accuracy[view], 6) for one in made]
                    found[f"{method}; {arm}; {view}"] = {**attacked(values, member), "accuracy": accuracy}
                costs = [one.epsilon for one in made if one.epsilon is not None]
                spent[f"{method}; {arm}"] = round(max(costs), 3) if costs else None
                progress(f"membership: {method}, {arm} done")
    return {"runs": runs, "hospitals": SITES, "candidates": count, "delta": DELTA, "found": found, "spent": spent}


@dataclass(frozen=True)
class _Run:
    confidence: dict[str, Values]
    accuracy: dict[str, float]
    epsilon: float | None


def _run(
    name: str, privacy: Privacy | None, data: list[dict[str, NDArray[Any]]], member: Flags, run: int, folder: Path
) -> _Run:
    """Train a federation on the members and look at its models as the attacker would."""
    method = METHODS[name](epochs=EPOCHS, batch_size=BATCH, lr=RATE, optimizer="sgd", privacy=privacy)
    files = {}
    for number, (one, chosen) in enumerate(zip(data, np.split(member, len(data)), strict=True)):
        site = f"hospital-{number}"
        train = one["train_images"][chosen], one["train_labels"][chosen]
        files[site] = write_hospital(folder / "sites", site, train, (one["test_images"][:4], one["test_labels"][:4]))
    task = Classification(DATASET, size=(SIDE, SIDE), architecture=NETWORK)
    job = Job("attacked", len(files), Settings(rounds=ROUNDS, references=(), seed=0, finetune=0), {}, method, task)
    federation = Federation(job, files, folder / "home")
    with noise_seed(run):
        federation.run()
    slot = next(iter(method.components()), "model")
    confidence: dict[str, list[Values]] = {view: [] for view in VIEWS}
    right: dict[str, list[float]] = {view: [] for view in VIEWS}
    own = _joined(data, "val")
    for site, one in zip(federation.runners, data, strict=True):
        kept = NETWORK.build((1, SIDE, SIDE), CLASSES)
        kept.load_state_dict(federation.runners[site].models[slot].state_dict())
        sent = loaded(NETWORK, federation.sent[site].slots[slot])
        if isinstance(method, FedPer):
            _fit_head(sent, *own)
        for view, network in (("sent", sent), ("kept", kept.eval())):
            confidence[view].append(_confidence(network, *_pair(one, "train")))
            inputs, labels = _pair(one, "test")
            with torch.no_grad():
                right[view].append(float((network(inputs).argmax(1) == labels).double().mean()))
    costs = [reply.header.privacy.epsilon for reply in federation.sent.values() if reply.header.privacy]
    return _Run(
        {view: np.concatenate(parts) for view, parts in confidence.items()},
        {view: float(np.mean(parts)) for view, parts in right.items()},
        max(costs) if costs else None,
    )


def _pair(arrays: Mapping[str, NDArray[Any]], split: str) -> tuple[Tensor, Tensor]:
    labels = torch.from_numpy(arrays[f"{split}_labels"][:, 0].astype(np.int64))
    return inputs_of(arrays[f"{split}_images"]), labels


def _joined(data: list[dict[str, NDArray[Any]]], split: str) -> tuple[Tensor, Tensor]:
    """The attacker's own images: alike, and nobody's training data."""
    parts = [_pair(one, split) for one in data]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts])


def _fit_head(network: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """FedPer's head never travels: the attacker trains one on own images, on the base that did."""
    assert isinstance(network, nn.Sequential)
    with torch.no_grad():
        features = network[:-1](inputs)
    head = network[-1]
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = sum((parameter**2).sum() for parameter in head.parameters())
        value = nn.functional.cross_entropy(head(features), labels) + 1e-3 * penalty
        torch.autograd.backward(value)
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]


def _confidence(network: nn.Module, inputs: Tensor, labels: Tensor) -> Values:
    """log(p / (1 - p)) of the true class (Carlini et al., Section V-A), from the outputs themselves."""
    with torch.no_grad():
        outputs = network(inputs).double()
    true = nn.functional.one_hot(labels, outputs.shape[1]).bool()
    others = outputs.masked_fill(true, -torch.inf).logsumexp(dim=1)
    found: Values = (outputs[true] - others).numpy()
    return found


def likelihood_ratios(values: Values, member: Flags) -> Values:
    """LiRA's scores, runs x candidates: of each run with all others as shadow models, with one deviation for all
    candidates, as the paper has it for few shadow models.

    Args:
        values: runs x candidates, the confidences.
        member: which of them were trained on; every candidate in at least two runs, and not in at least two.
    """
    scores = np.empty_like(values)
    for run in range(len(values)):
        others = np.arange(len(values)) != run
        shadows, inside = values[others], member[others]
        means, spreads = [], []
        for which in (inside, ~inside):
            mean = (shadows * which).sum(0) / which.sum(0)
            means.append(mean)
            degrees = which.sum() - which.shape[1]
            spreads.append(np.sqrt((((shadows - mean) ** 2) * which).sum() / degrees) + 1e-12)
        fits = [-(((values[run] - m) / s) ** 2) / 2 - np.log(s) for m, s in zip(means, spreads, strict=True)]
        scores[run] = fits[0] - fits[1]
    return scores


def attacked(values: Values, member: Flags) -> dict[str, Any]:
    """What both attacks reach against these confidences, runs x candidates."""
    from sklearn.metrics import roc_auc_score

    ratios = likelihood_ratios(values, member)
    result: dict[str, Any] = {}
    for attack, scores in (("loss", values), ("lira", ratios)):
        each = [roc_auc_score(flags, row) for flags, row in zip(member, scores, strict=True)]
        threshold = np.quantile(scores[~member], 1 - FALSE)
        result[attack] = [round(float(value), 6) for value in each]
        result[f"{attack}_found"] = round(float((scores[member] > threshold).mean()), 6)
    return result


def table_of(results: dict[str, Any]) -> str:
    """AUC of both attacks and patients found at 1 % false alarms, beside accuracy."""
    headings = [
        "method", "noise", "epsilon", "attacked", "accuracy", "AUC of the loss", "AUC of LiRA", "found by loss",
        "found by LiRA",
    ]  # fmt: skip
    rows = []
    for name, one in results["found"].items():
        method, arm, view = name.split("; ")
        cost = results["spent"][f"{method}; {arm}"]
        told = "" if cost is None else f"{cost:.1f}" if cost < 1000 else "above 1000"
        rows.append([
            method, arm, told, view, mean_sd(one["accuracy"]), mean_sd(one["loss"]), mean_sd(one["lira"]),
            f"{100 * one['loss_found']:.1f} %", f"{100 * one['lira_found']:.1f} %",
        ])  # fmt: skip
    told = (
        f"Membership, {results['runs']} runs of {results['hospitals']} hospitals with {results['candidates']} "
        f"candidates each; epsilon at delta {results['delta']:g}; found: members at 1 % false alarms."
    )
    return f"{told}\n\n{markdown(headings, rows)}"
