# SPDX-License-Identifier: Apache-2.0
"""The arms of ``benchmarks pfllib``, each run in a process of its own with the same arrays, model and batch order.

A round's seconds are from the end of the round before to its own end, so they hold all that an arm does in a round.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from benchmarks.common import resident
from medpfl import store
from medpfl.core.seeding import derive_seed
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.methods.ditto import Ditto
from medpfl.methods.fedavg import FedAvg
from medpfl.models.contract import Architecture
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from medpfl.tasks.classification import Classification

BARE, OURS, THEIRS, THEIRS_CACHED = "bare loop", "MedPFL", "PFLlib", "PFLlib, data in memory"
CLASSES, SIDE = 10, 28
Weights = dict[str, Tensor]


CNN, LINEAR = "FedAvgCNN", "Mclr_Logistic"


@dataclass(frozen=True)
class PFLlibNetwork(Architecture):
    """A network of PFLlib's, from the checkout that is on the path, for 28 x 28 images."""

    name: str
    """"FedAvgCNN" (582,026 weights) or "Mclr_Logistic" (7,850)."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        kind = getattr(importlib.import_module("flcore.trainmodel.models"), self.name)
        shape = {"in_features": input_shape[0], "dim": 1024} if self.name == CNN else {"input_dim": SIDE * SIDE}
        network: nn.Module = kind(num_classes=outputs, **shape)
        return network


@dataclass(frozen=True)
class Setting:
    """What the arms share. ``folder`` holds ``<site>.yaml`` and ``system/``, where PFLlib is to find its data."""

    method: str
    """"FedAvg" or "Ditto"."""
    architecture: str
    """Of ``PFLlibNetwork``."""
    rounds: int
    batch_size: int
    lr: float
    lam: float
    seed: int
    pfllib: str
    folder: str

    @property
    def site_files(self) -> dict[str, Path]:
        return {path.stem: path for path in sorted(Path(self.folder).glob("*.yaml"))}

    @property
    def task(self) -> Classification:
        return Classification(dataset="digits", size=(SIDE, SIDE), architecture=PFLlibNetwork(self.architecture))

    def data(self) -> dict[str, SiteData]:
        return {site: self.task.load(load_site_file(path, site)) for site, path in self.site_files.items()}

    def network(self) -> nn.Module:
        torch.manual_seed(derive_seed(self.seed, "initial weights"))  # as Build.network
        return PFLlibNetwork(self.architecture).build((1, SIDE, SIDE), CLASSES)

    def order(self, site: str, round_number: int, rows: int) -> Tensor:
        """The rows in the order of this round, as Site.training_batches draws it."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, site, round_number, "batches"))
        return torch.randperm(rows, generator=generator)


class Clock:
    """Wall and processor seconds of each round. Before each, it waits for its turn among the arms (a line on stdin).

    ``first`` is from the process's start to the end of round 1, without the waiting.
    """

    def __init__(self, rounds: int, tell: Callable[[str], None], turn: Callable[[], object]):
        self.rounds, self._tell, self._turn = rounds, tell, turn
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.first = 0.0

    def begin(self) -> None:
        if not self.seconds:
            self.first = time.time() - psutil.Process().create_time()
            self._tell("ready")
        if len(self.seconds) < self.rounds:
            self._turn()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self._wall)
        self.cpu.append(time.process_time() - self._cpu)
        if len(self.seconds) == 1:
            self.first += self.seconds[0]
        self._tell("done")


# -- the loop that a federation cannot be faster than -----------------------------------------------------------------


def bare(setting: Setting, clock: Clock) -> Weights:
    """The same training with no federation: per hospital one network (Ditto: two), plain torch, and the mean."""
    data = {site: found.splits["train"] for site, found in setting.data().items()}
    pairs = {site: (samples.inputs[:], samples.targets[:]) for site, samples in data.items()}
    total = sum(len(targets) for _, targets in pairs.values())
    common, network = setting.network().state_dict(), setting.network()
    personal = {site: setting.network() for site in pairs} if setting.method == "Ditto" else {}
    for round_number in range(1, setting.rounds + 1):
        clock.begin()
        mean = {key: torch.zeros_like(value) for key, value in common.items()}
        for site, (inputs, targets) in pairs.items():
            order = setting.order(site, round_number, len(targets))
            if personal:
                _train(personal[site], inputs, targets, order, setting, list(common.values()))
            network.load_state_dict(common)
            _train(network, inputs, targets, order, setting)
            for key, value in network.state_dict().items():
                mean[key].add_(value, alpha=len(targets) / total)
        common = mean
        clock.end()
    return _named(common, personal)


def _train(
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    order: Tensor,
    setting: Setting,
    anchor: list[Tensor] | None = None,
) -> None:
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=setting.lr)
    network.train()
    for rows in torch.split(order, setting.batch_size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        for parameter, centre in zip(parameters, anchor or [], strict=anchor is not None):
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() - centre, alpha=setting.lam)
        optimizer.step()


def _named(common: Weights, personal: dict[str, nn.Module]) -> Weights:
    found = {f"common/{key}": value for key, value in common.items()}
    for site, network in personal.items():
        found.update({f"{site}/{key}": value for key, value in network.state_dict().items()})
    return found


# -- this package -----------------------------------------------------------------------------------------------------


def ours(setting: Setting, clock: Clock) -> Weights:
    """``medpfl simulate``'s own function: messages, checks, mixing, records and every checkpoint included."""
    common: dict[str, Any] = {"batch_size": setting.batch_size, "lr": setting.lr, "optimizer": "sgd"}
    method: Method = FedAvg(**common) if setting.method == "FedAvg" else Ditto(lam=setting.lam, **common)
    slot = "fedavg" if setting.method == "FedAvg" else "global"
    settings = Settings(rounds=setting.rounds, references=(), seed=setting.seed, finetune=0)
    files, folder = setting.site_files, Path(setting.folder) / "ours"
    job = Job("digits", len(files), settings, {}, method, setting.task)

    def after_round(coordinator: Coordinator) -> None:
        clock.end()
        clock.begin()

    clock.begin()
    coordinator = simulate(job, files, folder / "results", folder / "home", after_round)
    state = coordinator.rounds.train_messages(setting.rounds + 1, [coordinator.roster[0]])[coordinator.roster[0]].slots[
        slot
    ]
    found = {f"common/{key.removeprefix(f'{slot}.')}": value for key, value in state.items()}
    if setting.method == "Ditto":
        for site in files:
            kept, _ = store.read(folder / "home" / site / job.name / "models" / "personal-last.safetensors")
            prefix = "personal."
            found.update({f"{site}/{k.removeprefix(prefix)}": v for k, v in kept.items() if k.startswith(prefix)})
    return found


# -- PFLlib's own server and clients ----------------------------------------------------------------------------------


class _Enough(Exception):
    """Ends PFLlib's loop before it writes its result files."""


def theirs(setting: Setting, clock: Clock, cached: bool) -> Weights:
    """PFLlib's ``Server.train`` with its own classes; only the order of the batches is given from outside.

    Args:
        cached: keep what PFLlib reads; as published it reads and unpacks a client's file for every training.
    """
    os.chdir(Path(setting.folder) / "system")
    base = importlib.import_module("flcore.clients.clientbase")
    if cached:
        vars(base)["read_client_data"] = functools.cache(base.read_client_data)
    name = {"FedAvg": "avg", "Ditto": "ditto"}[setting.method]
    module = importlib.import_module(f"flcore.servers.server{name}")
    client_name = {"FedAvg": "clientAVG", "Ditto": "clientDitto"}[setting.method]
    vars(module)[client_name] = _ordered(getattr(module, client_name), setting)
    server_class = getattr(module, setting.method)

    class Timed(server_class):  # type: ignore[misc,valid-type]
        """Stops the time after each aggregation, PFLlib's last act in a round."""

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            clock.end()
            for client in self.clients:
                client.round_number += 1
            if len(clock.seconds) == setting.rounds:
                raise _Enough
            clock.begin()

    server = Timed(_arguments(setting), 0)
    clock.begin()
    with contextlib.suppress(_Enough):
        server.train()
    names = list(setting.site_files)  # sorted, as the folders that were written
    personal = {names[c.id]: c.model_per for c in server.clients} if setting.method == "Ditto" else {}
    return _named(server.global_model.state_dict(), personal)


def _ordered(client_class: Any, setting: Setting) -> Any:
    """The client with its own loader's data, batch size and drop_last, in the order that the other arms have."""

    class Ordered(client_class):
        round_number = 1

        def load_train_data(self, batch_size: int | None = None) -> Any:
            loader = super().load_train_data(batch_size)
            order = setting.order(list(setting.site_files)[self.id], self.round_number, len(loader.dataset))
            return torch.utils.data.DataLoader(
                loader.dataset, loader.batch_size, drop_last=loader.drop_last, sampler=_Order(order)
            )

    return Ordered


class _Order(torch.utils.data.Sampler[int]):
    def __init__(self, order: Tensor):
        self.order = order.tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def _arguments(setting: Setting) -> argparse.Namespace:
    """What PFLlib's main.py would pass: its defaults, no evaluation after round 1, nothing slow or dropped."""
    return argparse.Namespace(
        device="cpu", dataset="digits", num_classes=CLASSES, model=copy.deepcopy(setting.network()),
        algorithm=setting.method, global_rounds=setting.rounds, eval_gap=setting.rounds + 1,
        local_epochs=1, plocal_epochs=1, batch_size=setting.batch_size, mu=setting.lam,
        local_learning_rate=setting.lr, learning_rate_decay=False, learning_rate_decay_gamma=0.99,
        num_clients=len(setting.site_files), join_ratio=1.0, random_join_ratio=False, few_shot=0,
        client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0, time_select=False, time_threthold=1e4,
        goal="bench", save_folder_name="saved", top_cnt=100, auto_break=False, dlg_eval=False, dlg_gap=100,
        batch_num_per_client=2, num_new_clients=0, fine_tuning_epoch_new=0,
    )  # fmt: skip


def write_for_pfllib(setting: Setting) -> None:
    """The hospitals' arrays, as this package's tasks see them, in PFLlib's files."""
    for number, data in enumerate(setting.data().values()):
        for split in ("train", "test"):
            samples = data.splits[split]
            content = {"x": samples.inputs[:].numpy(), "y": samples.targets[:].numpy()}
            folder = Path(setting.folder) / "dataset" / "digits" / split
            folder.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(folder / f"{number}.npz", data=np.array(content, dtype=object))
    (Path(setting.folder) / "system").mkdir(exist_ok=True)


def main() -> None:
    """``ARM SETTING.json OUT``: run an arm; writes OUT.json and the last weights as OUT.safetensors."""
    arm, out = sys.argv[1], Path(sys.argv[3]).resolve()
    setting = Setting(**json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
    told, sys.stdout = sys.stdout, sys.stderr  # PFLlib prints
    clock = Clock(setting.rounds, lambda word: print(word, file=told, flush=True), sys.stdin.readline)
    sys.path.insert(0, str(Path(setting.pfllib) / "system"))
    torch.set_num_threads(1)
    if arm == BARE:
        weights = bare(setting, clock)
    elif arm == OURS:
        weights = ours(setting, clock)
    else:
        weights = theirs(setting, clock, cached=arm == THEIRS_CACHED)
    found = {"seconds": clock.seconds, "cpu_seconds": clock.cpu, "first": clock.first, "peak_mb": resident("VmHWM")}
    store.save(out.with_suffix(".safetensors"), weights, {})
    out.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")
