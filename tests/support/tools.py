# SPDX-License-Identifier: Apache-2.0
"""Driving the round loop from a test."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from medpfl import job as job_module
from medpfl import store
from medpfl.core.mixers import Identity, Mean, Mixer
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.demo.phantom import write_phantoms
from medpfl.job import Job, load_job
from medpfl.methods.contract import Method
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.loop import Loop, beginning, carry, one_round
from medpfl.rounds.messages import Message
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from medpfl.tasks.tabular import Tabular

Make = Callable[..., Job]


def require_gpu() -> None:
    """Skips the test, with the reason, where torch finds no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use on this machine")


@dataclass(frozen=True)
class NormedTabular(Tabular):
    """A table's network with BatchNorm: Linear, BatchNorm, ReLU, Linear (its head, "3")."""

    def network(self, data: SiteData) -> nn.Module:
        first, relu, last = super().network(data).children()
        return nn.Sequential(first, nn.BatchNorm1d(self.hidden[0]), relu, last)


def normed() -> NormedTabular:
    return NormedTabular(dataset="blood", hidden=(4,))


def retell(message: Message[Any], **change: Any) -> None:
    """Change what a message says, behind its back."""
    object.__setattr__(message, "header", message.header.model_copy(update=change))


def outcome(folder: Path) -> dict[str, Any]:
    """Everything a job leaves at the server that must not depend on time or chance."""
    summary = json.loads((folder / "summary.json").read_text())
    slots = {path.stem: store.read(path)[0] for path in sorted((folder / "slots").glob("*.safetensors"))}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [line for line in lines if line["split"] in ("validation", "test")]
    return {"test": summary["test"], "best": summary["best"], "slots": slots, "scores": scores}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["test"] == other["test"]
    assert one["best"] == other["best"]
    assert one["scores"] == other["scores"]
    assert one["slots"].keys() == other["slots"].keys()
    for slot, tensors in one["slots"].items():
        assert tensors.keys() == other["slots"][slot].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, other["slots"][slot][key]), f"{slot}: {key}"


def run(job: Job, sites: dict[str, Path], folder: Path, **options: Any) -> dict[str, Any]:
    simulate(job, sites, folder / "results", folder / "home", **options)
    return outcome(folder / "results")


def deploy_to(folder: Path, sites: list[str]) -> Path:
    """The job folder, whose job now goes to these hospitals only: one that takes no part costs a process."""
    file = folder / "meta.json"
    meta = {**json.loads(file.read_text()), "deploy_map": {"app": ["server", *sites]}, "min_clients": len(sites)}
    file.write_text(json.dumps(meta))
    return folder


def interrupt(verb: str, folder: Path, patience: float) -> None:
    """Start a verb of "medpfl poc" with two hospitals, press Ctrl-C once its job is submitted, and check that nothing
    is left of it. (A third is a process or two more, which ends as the second does.)"""
    for site in write_phantoms(folder / "sites")[2:]:
        (folder / "sites" / f"{site}.yaml").unlink()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "medpfl", "poc", verb, "--sites", str(folder / "sites"), "--results", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        # A shell's background jobs ignore Ctrl-C, and so would the processes that a test starts there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "submitted" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(patience) == 130
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    assert not list(folder.glob("medpfl-poc-*"))


def pieces(job: Job, sites: dict[str, Path], folder: Path) -> tuple[Coordinator, dict[str, SiteRunner]]:
    runners = {
        site: SiteRunner(site, job.method, job.task, partial(load_site_file, path, site), folder / site)
        for site, path in sites.items()
    }
    return Coordinator(job, list(sites), folder / "s", folder / "r"), runners


def exchange(runners: dict[str, SiteRunner], messages: Mapping[str, Message[Any]]) -> dict[str, Message[Any]]:
    return {site: runners[site].handle(m) for site, m in messages.items()}


def follow(steps: Loop, runners: dict[str, SiteRunner]) -> None:
    """A loop, or a part of one, to its end."""
    carry(steps, lambda asked: exchange(runners, asked.messages))


def ready(coordinator: Coordinator, runners: dict[str, SiteRunner]) -> None:
    follow(beginning(coordinator), runners)


def round_of(
    coordinator: Coordinator, runners: dict[str, SiteRunner], number: int, sites: list[str] | None = None
) -> None:
    """One whole round with these hospitals (all that joined), its further exchanges included."""
    follow(one_round(coordinator, number, sites or coordinator.joined), runners)


def write_job(job: Job, folder: Path) -> Path:
    """The job folder, which ``load_job`` reads back as ``job``."""
    job_module.write_job(job, folder)
    assert load_job(folder) == job
    return folder


def train(
    make_job: Make,
    sites: dict[str, Path],
    folder: Path,
    method: Method,
    slot: str,
    mixer: Mixer,
    **job: Any,
) -> tuple[dict[str, SiteRunner], dict[str, dict[str, torch.Tensor]]]:
    """Three rounds with both references beside the method; returns the hospitals after the last local round, and
    the server's slots after the last mixing."""
    mixers: dict[str, Mixer] = {"local": Identity(), "fedavg": Mean(), slot: mixer}
    coordinator, runners = pieces(make_job(mixers=mixers, method=method, **job), sites, folder)
    ready(coordinator, runners)
    for number in (1, 2, 3):
        round_of(coordinator, runners, number)
    return runners, coordinator.rounds.train_messages(4, ["anna"])["anna"].slots


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two networks are equal bit for bit, each under its own name."""
    stripped = [{key.split(".", 1)[1]: value for key, value in state.items()} for state in (one, other)]
    assert stripped[0].keys() == stripped[1].keys() and stripped[0]
    return all(torch.equal(value, stripped[1][key]) for key, value in stripped[0].items())


def entries(runner: SiteRunner, model: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in runner.models.state_dict().items() if key.startswith(f"{model}.")}


def bubbles(picture: str) -> int:
    """How many there are in a figure of who has which labels."""
    assert picture.startswith("<svg")
    return len(re.findall(r'<path d="[^"]*C [^"]*"', picture))  # nothing else is round
