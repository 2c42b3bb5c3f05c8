# SPDX-License-Identifier: Apache-2.0
"""What the attacks attack: hospitals with generated images, small networks, and messages of the real round loop."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn

from medpfl.data.arrays.prepare import fixed_range, prepare
from medpfl.data.policy import STUDY
from medpfl.data.site_file import load_site_file
from medpfl.demo.patterns import CLASSES, SIDE, write_patterns
from medpfl.job import Job
from medpfl.models.contract import Architecture
from medpfl.privacy.noise import FIXED
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.loop import Exchange, Watch, carry, training
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import TrainReply
from medpfl.rounds.server.coordinator import Coordinator, Replies

DATASET = "pattern"
Images = NDArray[np.uint8]
Pools = list[dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class Flat(Architecture):
    """A perceptron on pixels; without hidden layers, logistic regression."""

    hidden: tuple[int, ...] = ()

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = int(np.prod(input_shape))
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        return nn.Sequential(*layers, nn.Linear(width, outputs))


@dataclass(frozen=True)
class SmallConv(Architecture):
    """Two 5 x 5 convolutions of 8 channels, each with a sigmoid, the second of stride 2, and a linear layer: a small
    relative of the LeNet of Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, height, width = input_shape
        return nn.Sequential(
            *(nn.Conv2d(channels, 8, 5, 1, 2), nn.Sigmoid(), nn.Conv2d(8, 8, 5, 2, 2), nn.Sigmoid(), nn.Flatten()),
            nn.Linear(8 * ((height + 1) // 2) * ((width + 1) // 2), outputs),
        )


def pools(folder: Path, sites: int, seed: int) -> Pools:
    """Arrays of the first hospitals of ``medpfl demo patterns``, in which all are alike: uint8 images N x 16 x 16 and
    labels N x 1 of the splits train (80), val (40) and test (300)."""
    names = write_patterns(folder, seed=seed)[:sites]
    return [dict(np.load(folder / f"{name}.npz")) for name in names]


def write_hospital(
    folder: Path, site: str, train: tuple[Images, Images], test: tuple[Images, Images], own_policy: bool = True
) -> Path:
    """The site file of a hospital with these images and labels; ``own_policy``: one that lets everything pass, as
    nobody's is, so that also what a policy would refuse can be attacked; else that of a site file that says nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"train_images": train[0], "train_labels": train[1], "test_images": test[0], "test_labels": test[1]}
    np.savez(folder / f"{site}.npz", **arrays)  # type: ignore[arg-type]
    classes = {f"pattern {number}": [number] for number in range(CLASSES)}
    content: dict[str, Any] = {
        "site": site,
        "datasets": {DATASET: {"kind": "arrays", "file": f"{site}.npz", "classes": classes}},
    }
    if own_policy:
        content["policy"] = {key: getattr(STUDY, key) for key in sorted(STUDY.model_fields_set)}
    path = folder / f"{site}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def inputs_of(images: Images) -> Tensor:
    """N x 1 x 16 x 16, as hospitals prepare them: the range of bytes is known to everybody."""
    ranges = fixed_range(images.dtype, 1)
    assert ranges is not None
    return prepare(images[:, None], (SIDE, SIDE), ranges)


class Federation:
    """A job's coordinator and hospitals, whose messages can be looked at as a server would."""

    def __init__(self, job: Job, files: Mapping[str, Path], home: Path):
        self.runners = {
            site: SiteRunner(site, job.method, job.task, partial(load_site_file, path, site), home / site)
            for site, path in sorted(files.items())
        }
        self.coordinator = Coordinator(job, list(self.runners), home / "server", home / "results")
        self.sent: dict[str, Message[TrainReply]] = {}
        """The newest message of each hospital's training."""

    def run(self, stop_after: int | None = None) -> None:
        """All rounds, without the test at the end.

        Raises:
            MedPFLError: as the hospitals and the server raise them.
        """
        try:
            carry(training(self.coordinator, Watch(), stop_after, test=False), self._deliver)
        finally:
            for runner in self.runners.values():
                runner.close()

    def _deliver(self, exchange: Exchange) -> Replies:
        replies = {site: self.runners[site].handle(message) for site, message in exchange.messages.items()}
        for site, reply in replies.items():
            if isinstance(reply.header, TrainReply):
                # The server mixes in place, so this copies what came.
                slots = {slot: {key: one.clone() for key, one in state.items()} for slot, state in reply.slots.items()}
                self.sent[site] = Message(reply.header, slots)
        return replies


@contextmanager
def noise_seed(seed: int) -> Iterator[None]:
    """Noise that can be repeated (``medpfl.privacy.noise.FIXED``); the attacks do not use that they could know it."""
    before = os.environ.get(FIXED)
    os.environ[FIXED] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FIXED]
        else:
            os.environ[FIXED] = before


def loaded(architecture: Architecture, state: Mapping[str, Tensor]) -> nn.Module:
    """The network with the entries of a slot, or a part of it; names are "network.entry". Entries that the slot lacks
    are zeros."""
    network = architecture.build((1, SIDE, SIDE), CLASSES)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    unknown = network.load_state_dict({key.split(".", 1)[1]: value for key, value in state.items()}, strict=False)
    assert not unknown.unexpected_keys
    return network.eval()


Progress = Callable[[str], None]
Batch = tuple[Tensor, Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
