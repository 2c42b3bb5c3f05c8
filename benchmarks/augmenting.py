# SPDX-License-Identifier: Apache-2.0
"""``benchmarks augmenting``: what a training step costs with augmentation, as a multiple of one without.

One process with one thread. Each turn trains a round on the same samples without augmentation, with it, and once more
in the same round, as its second network does, which sees the batches that were made for the first.

Then, by the clock, the share of a round that the first network spends waiting for its batches: made when they are
needed, and made by a thread while the step before runs.
"""

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import markdown
from medpfl.core.devices import training_device
from medpfl.core.errors import MedPFLError
from medpfl.data.samples import Samples, SiteData
from medpfl.methods.contract import Hospital, Site
from medpfl.methods.local import Local
from medpfl.methods.presented import Presented
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation

PLAIN, FIRST, NEXT = "without", "first network", "next network"
NEEDED, AHEAD = "when needed", "ahead"
_STEPS = 12  # of a round whose waiting is measured


def _settings() -> list[tuple[str, Any, str, tuple[int, ...], int, int]]:
    """Name, task without augmentation, preset, shape of an input, samples and samples a step."""
    skin = Classification("a", size=(48, 64), architecture=ResNet(width=16))
    slices = Segmentation("a", size=(64, 64), architecture=UNet((16, 32, 64, 128)))
    volumes = Segmentation("a", size=(40, 56, 40), spacing=(1, 1, 1), architecture=UNet((16, 32, 64)))
    return [
        ("photographs 48 x 64, ResNet18 of width 16", skin, "dermoscopy", (3, 48, 64), 64, 16),
        ("slices 64 x 64, UNet 16-32-64-128", slices, "nnunet", (1, 64, 64), 64, 16),
        ("patches 40 x 56 x 40, UNet 16-32-64", volumes, "nnunet", (1, 40, 56, 40), 4, 2),
        ("patches 40 x 56 x 40, UNet 16-32-64", volumes, "mri", (1, 40, 56, 40), 4, 2),
    ]


def measure(repeats: int) -> dict[str, Any]:
    """Milliseconds of a step (medians) of every setting, and the ratios to the step without augmentation.

    Args:
        repeats: turns.
    """
    if repeats < 1:
        raise MedPFLError(f"--repeats must be at least 1, got {repeats}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_measured(*setting, repeats) for setting in _settings()]
    finally:
        torch.set_num_threads(threads)
    return {"repeats": repeats, "settings": rows}


def _measured(
    name: str, task: Any, preset: str, shape: tuple[int, ...], count: int, batch: int, repeats: int
) -> dict[str, Any]:
    augmented = type(task)("a", size=task.size, architecture=task.architecture, augment=preset)
    plain, changed = (_Timed(one, shape, count, batch) for one in (task, augmented))
    found: dict[str, list[float]] = {PLAIN: [], FIRST: [], NEXT: []}
    for turn in range(repeats + 1):  # the first warms up
        for kind, timed in ((PLAIN, plain), (FIRST, changed), (NEXT, changed)):
            found[kind].append(timed.round(turn + 1) * batch / count)
    medians = {kind: float(np.median(times[1:])) for kind, times in found.items()}
    ratios = {kind: round(medians[kind] / medians[PLAIN], 2) for kind in (FIRST, NEXT)}
    clock: dict[str, list[tuple[float, float]]] = {NEEDED: [], AHEAD: []}
    for turn in range(repeats):
        for kind in clock:
            clock[kind].append(changed.waiting(repeats + 2 + turn, kind == AHEAD))
    waiting = {kind: round(float(np.median([share for share, _ in turns])), 3) for kind, turns in clock.items()}
    ahead = float(np.median([b / a for (_, a), (_, b) in zip(clock[NEEDED], clock[AHEAD], strict=True)]))
    return {
        "name": name, "preset": preset, "batch": batch, "step_ms": round(1e3 * medians[PLAIN], 1), "ratios": ratios,
        "waiting": waiting, "ahead_to_needed": round(ahead, 2),
    }  # fmt: skip


class _Timed:
    """A hospital with random samples, whose rounds are timed."""

    def __init__(self, task: Any, shape: tuple[int, ...], count: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(0)
        masks = isinstance(task, Segmentation)
        targets = torch.randint(0, 2, (count, *shape[1:]) if masks else (count,), generator=generator)
        inputs = torch.randn(count, *shape, generator=generator)
        samples = Samples(
            inputs, targets.to(torch.uint8) if masks else targets, np.arange(count), [str(one) for one in range(count)]
        )
        data = SiteData({"train": samples}, ["a", "b"])
        torch.manual_seed(0)
        device = training_device()
        models = torch.nn.ModuleDict({"local": task.network(data)}).to(device)
        self._hospital = Hospital(
            task=task, data=data, models=models, device=device, roster=("a",), name="a", seed=0
        )  # fmt: skip
        self._method = Local(batch_size=batch)

    def round(self, number: int) -> float:
        """Seconds of processor time, for other work on the machine does not count there."""
        site = Site(self._hospital, self._method, number)
        started = time.thread_time()
        site.fit("local")
        return time.thread_time() - started

    def waiting(self, number: int, ahead: bool) -> tuple[float, float]:
        """The share of a round that is spent waiting for batches, and the round's seconds, both by the clock.

        Args:
            ahead: whether a thread makes the batches.
        """
        hospital = dataclasses.replace(self._hospital, presented=Presented(most=0, ahead=ahead))
        site = Site(hospital, Local(batch_size=self._method.batch_size, steps=_STEPS), number)
        model = site.models["local"].train()
        batches, waited, started = site.training_batches(), 0.0, time.perf_counter()
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            with site.autocast():
                loss = site.task.loss(model(batch.inputs), batch.targets)
            site.step("local", loss)
            if site.device.type == "cuda":
                torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return waited / seconds, seconds


def table_of(results: dict[str, Any]) -> str:
    """The settings, a step without augmentation, the ratios to it, and the waiting."""
    rows = [
        [
            one["name"], f"`{one['preset']}`", str(one["batch"]), f"{one['step_ms']:.0f}",
            f"{one['ratios'][FIRST]:.2f}", f"{one['ratios'][NEXT]:.2f}",
        ]
        for one in results["settings"]
    ]  # fmt: skip
    waits = [
        [
            one["name"], f"`{one['preset']}`", f"{one['waiting'][NEEDED]:.0%}", f"{one['waiting'][AHEAD]:.0%}",
            f"{one['ahead_to_needed']:.2f}",
        ]
        for one in results["settings"]
    ]  # fmt: skip
    return (
        f"One thread, medians of {results['repeats']} turns, processor time; 1 is a step without augmentation:\n\n"
        + markdown(["what", "preset", "samples a step", "step without, ms", "first network", "next network"], rows)
        + f"\n\nBy the clock, rounds of {_STEPS} steps, the share that the first network waits for its batches:\n\n"
        + markdown(["what", "preset", "made when needed", "made ahead", "time of a round, ahead to when needed"], waits)
    )
