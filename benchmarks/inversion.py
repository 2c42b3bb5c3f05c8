# SPDX-License-Identifier: Apache-2.0
"""Gradient inversion: what of a hospital's images can be computed from one update that it sends.

Of logistic regression exactly: the change of a class's weights over the change of its bias is a weighted sum of the
batch, and of one image the image itself. Of a small convolutional network by optimisation: Geiping, Bauermeister,
Droege, Moeller, "Inverting Gradients - How easy is it to break privacy in federated learning?", NeurIPS 2020 (cosine
distance; without their term for smoothness, for these images are noisy), after Zhu, Liu, Han, "Deep Leakage from
Gradients", NeurIPS 2019. The attacker is told the labels, knows what the server sent, and takes the update for one
gradient, whatever it was.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.attacked import (
    DATASET,
    Batch,
    Federation,
    Flat,
    Pools,
    Progress,
    SmallConv,
    loaded,
    noise_seed,
    pools,
    seeded,
    write_hospital,
)
from benchmarks.common import markdown, mean_sd
from medpfl.core.errors import PolicyRefused
from medpfl.data.samples import Samples
from medpfl.demo.patterns import SIDE
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.schedules import StepDown
from medpfl.models.contract import Architecture
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.tasks import Classification

NETWORKS: dict[str, Architecture] = {"logistic regression": Flat(), "convolutions": SmallConv()}
IMAGES, RATE, ITERATIONS, STEP = 16, 0.1, 300, 0.1
FOUND = 0.9
"""An image counts as found where a reconstruction's correlation with it is above this."""
TRIES = 60
"""Seeds that are tried until a lot has its expected size."""


@dataclass(frozen=True)
class Arm:
    """How a hospital trains in the round; ``batch`` images a step (a lot's expected size)."""

    name: str
    batch: int
    training: dict[str, Any] = field(default_factory=dict)


def _noised(batch: int) -> list[Arm]:
    arms = []
    for much in (0.01, 1.0):
        arms.append(
            Arm(f"ClippedNoise, {much:g} x clip", batch, {"privacy": ClippedNoise(clip=0.5, noise_multiplier=much)})
        )
        arms.append(Arm(f"DPSGD, multiplier {much:g}", batch, {"privacy": DPSGD(noise_multiplier=much)}))
    return arms


ARMS = [
    *(Arm("one step", batch) for batch in (1, 2, 4, 6, 8)),
    Arm("four steps", 2, {"steps": 4}),
    Arm("eight steps", 1, {"steps": 8}),
    Arm("eight steps, of which a schedule leaves one", 1, {"steps": 8, "schedule": StepDown(at=(0.1,), by=1e-9)}),
    Arm("one step of Adam", 1, {"optimizer": "adam"}),
    Arm("one step of Adam", 4, {"optimizer": "adam"}),
    *_noised(1),
    *_noised(4),
]


@dataclass(frozen=True)
class Watched(Classification):
    """Classification that keeps what it has shown to the network: the truth that an attack is compared with."""

    seen: ClassVar[list[Batch]] = []

    def present(self, samples: Samples, chosen: Tensor, generator: torch.Generator) -> Batch:
        batch = super().present(samples, chosen, generator)
        self.seen.append(batch)
        return batch


@dataclass(frozen=True)
class _Stolen:
    """``update``: entry to what the round has changed; ``inputs`` and ``labels``: what it was learnt from; ``others``:
    as many images of the same hospital that it was not."""

    before: nn.Module
    update: dict[str, Tensor]
    inputs: Tensor
    labels: Tensor
    others: Tensor


def measure(
    trials: int,
    progress: Progress,
    arms: Sequence[Arm] = ARMS,
    iterations: int = ITERATIONS,
    data: Pools | None = None,
) -> dict[str, Any]:
    """Every network and arm, ``trials`` updates each.

    Args:
        data: the hospitals' images; None: generated ones.

    Returns:
        A row for each: the correlation of each image with the reconstruction most like it (mean, trial by trial), the
        same of images that the update was not learnt from, the share found, and the rule of the default policy that
        refuses the arm.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        data = data or pools(Path(scratch) / "pool", 2, 0)
        for name, network in NETWORKS.items():
            for number, arm in enumerate(arms):
                folder = Path(scratch) / f"{name} {number}"
                refused = _refusal(network, arm, data, folder / "policy")
                own, others, found = [], [], []
                for trial, stolen in enumerate(_updates(network, arm, data, folder, trials)):
                    images = _analytic(stolen) if isinstance(network, Flat) else _optimised(stolen, trial, iterations)
                    likeness = alike(stolen.inputs, images)
                    own.append(round(float(likeness.mean()), 6))
                    others.append(round(float(alike(stolen.others, images).mean()), 6))
                    found.append(round(float((likeness > FOUND).double().mean()), 6))
                rows.append({
                    "network": name, "arm": arm.name, "images": arm.batch * int(arm.training.get("steps", 1)),
                    "own": own, "others": others, "found": found, "refused": refused,
                })  # fmt: skip
            progress(f"inversion: {name} done")
    return {"trials": trials, "iterations": iterations, "rows": rows}


def _job(network: Architecture, arm: Arm, seed: int) -> Job:
    training = {"steps": 1, "batch_size": arm.batch, "lr": RATE, "optimizer": "sgd", **arm.training}
    task = Watched(DATASET, size=(SIDE, SIDE), architecture=network)
    return Job("inverted", 2, Settings(rounds=1, references=(), seed=seed, finetune=0), {}, FedAvg(**training), task)


def _federation(
    network: Architecture, arm: Arm, seed: int, data: list[dict[str, NDArray[Any]]], home: Path, own_policy: bool
) -> Federation:
    files = {}
    for number, one in enumerate(data):
        site = f"hospital-{number}"
        train = one["train_images"][:IMAGES], one["train_labels"][:IMAGES]
        test = one["test_images"][:4], one["test_labels"][:4]
        files[site] = write_hospital(home / "sites", site, train, test, own_policy)
    return Federation(_job(network, arm, seed), files, home)


def _refusal(network: Architecture, arm: Arm, data: list[dict[str, NDArray[Any]]], home: Path) -> str | None:
    """The key of the rule by which a hospital whose site file says nothing refuses this; None: it takes part."""
    try:
        _round(_federation(network, arm, 0, data, home, own_policy=False))
    except PolicyRefused as refused:
        return str(refused).partition("('")[2].partition("')")[0]
    return None


def _updates(
    network: Architecture, arm: Arm, data: list[dict[str, NDArray[Any]]], folder: Path, count: int
) -> list[_Stolen]:
    """What hospital-0 sends in the first round, with other seeds of weights, batches and noise. Of DPSGD those whose
    lot has its expected size, so that arms can be compared; a hospital's lot is of chance size."""
    wanted, found = arm.batch * int(arm.training.get("steps", 1)), []
    for seed in range(TRIES):
        federation = _federation(network, arm, seed, data, folder / str(seed), own_policy=True)
        Watched.seen.clear()
        with noise_seed(seed):
            stolen = _steal(federation, network)
        if stolen is not None and len(stolen.inputs) == wanted:
            found.append(stolen)
        if len(found) == count:
            break
    return found


def _round(federation: Federation) -> tuple[Samples, dict[str, Tensor], dict[str, Tensor]]:
    """The training samples of hospital-0, and the model that it was sent and what it sent back, in the first round.

    Raises:
        PolicyRefused: it lets nothing leave.
    """
    runner = federation.runners["hospital-0"]
    try:
        federation.coordinator.take_init(
            {site: federation.runners[site].handle(m) for site, m in federation.coordinator.init_messages().items()}
        )
        message = federation.coordinator.rounds.train_messages(1, ["hospital-0"])["hospital-0"]
        before = {key: value.clone() for key, value in message.slots["fedavg"].items()}
        return runner.data.splits["train"], before, runner.handle(message).slots["fedavg"]
    finally:
        federation.coordinator.close()
        for one in federation.runners.values():
            one.close()


def _steal(federation: Federation, network: Architecture) -> _Stolen | None:
    """None: the lot was empty, and the policy let nothing leave."""
    try:
        samples, before, after = _round(federation)
    except PolicyRefused:
        return None
    inputs = torch.cat([batch[0] for batch in Watched.seen])
    labels = torch.cat([batch[1] for batch in Watched.seen])
    every = samples.inputs[:]
    assert isinstance(every, Tensor)
    apart = [image for image in every if not any(torch.equal(image, one) for one in inputs)]
    update = {key.split(".", 1)[1]: after[key] - before[key] for key in after}
    return _Stolen(loaded(network, before), update, inputs, labels, torch.stack(apart[: len(inputs)]))


def _analytic(stolen: _Stolen) -> Tensor:
    """One reconstruction a class, N x pixels: the change of its weights over that of its bias."""
    weight, bias = stolen.update["1.weight"].double(), stolen.update["1.bias"].double()
    return weight / torch.where(bias.abs() < 1e-12, torch.ones_like(bias), bias)[:, None]


def _optimised(stolen: _Stolen, seed: int, iterations: int) -> Tensor:
    """Images whose gradient points where the update does not, N x pixels."""
    network = stolen.before
    names = [name for name, _ in network.named_parameters()]
    weights = list(network.parameters())
    target = torch.cat([-stolen.update[name].flatten() for name in names])
    images = torch.randn(stolen.inputs.shape, generator=seeded(seed)).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=STEP)
    for _ in range(iterations):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images), stolen.labels)
        gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, weights, create_graph=True)])
        distance = 1 - nn.functional.cosine_similarity(gradient, target, dim=0)
        (images.grad,) = torch.autograd.grad(distance, images)
        optimizer.step()
    return images.detach().flatten(1)


def alike(true: Tensor, made: Tensor) -> Tensor:
    """Of each of the true images (N x ...) the largest correlation with one that was made (M x pixels), in [-1, 1]."""

    def normal(images: Tensor) -> Tensor:
        flat = images.flatten(1).double()
        return nn.functional.normalize(flat - flat.mean(dim=1, keepdim=True), dim=1)

    return (normal(true) @ normal(made).T).amax(dim=1)


def table_of(results: dict[str, Any]) -> str:
    """Correlations, with the images and with others, and what the default policy says."""
    headings = ["network", "update", "images", "correlation", "with other images", "found", "default policy"]
    rows = []
    for one in results["rows"]:
        refused = f"refused: `{one['refused']}`" if one["refused"] else "allowed"
        rows.append([
            one["network"], one["arm"], str(one["images"]), mean_sd(one["own"]), mean_sd(one["others"]),
            f"{100 * float(np.mean(one['found'])):.0f} %", refused,
        ])  # fmt: skip
    told = (
        f"Inversion, {results['trials']} updates of each kind, {results['iterations']} iterations; found: images with "
        f"a correlation above {FOUND}."
    )
    return f"{told}\n\n{markdown(headings, rows)}"
