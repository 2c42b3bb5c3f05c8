# SPDX-License-Identifier: Apache-2.0
"""``benchmarks augmenting``: what a training step costs with augmentation, as a multiple of one without.

One process with one thread. Each turn trains a round on the same samples without augmentation, with it, and once more
in the same round, as its second network does, which sees the batches that were made for the first.
"""

import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import markdown
from medpfl.core.errors import MedPFLError
from medpfl.data.samples import Samples, SiteData
from medpfl.methods.base import Hospital, Site
from medpfl.methods.local import Local
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation

PLAIN, FIRST, NEXT = "without", "first network", "next network"


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
    return {"name": name, "preset": preset, "batch": batch, "step_ms": round(1e3 * medians[PLAIN], 1), "ratios": ratios}


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
        models = torch.nn.ModuleDict({"local": task.network(data)})
        device = torch.device("cpu")
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


def table_of(results: dict[str, Any]) -> str:
    """The settings, a step without augmentation, and the ratios to it."""
    rows = [
        [
            one["name"], f"`{one['preset']}`", str(one["batch"]), f"{one['step_ms']:.0f}",
            f"{one['ratios'][FIRST]:.2f}", f"{one['ratios'][NEXT]:.2f}",
        ]
        for one in results["settings"]
    ]  # fmt: skip
    return (
        f"One thread, medians of {results['repeats']} turns, processor time; 1 is a step without augmentation:\n\n"
        + markdown(["what", "preset", "samples a step", "step without, ms", "first network", "next network"], rows)
    )
