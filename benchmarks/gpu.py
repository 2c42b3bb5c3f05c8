# SPDX-License-Identifier: Apache-2.0
"""``benchmarks gpu``: training on the device of this machine, GPU or processor, beside a bare loop of the same network.

Four loops over the same random samples, with the same network, optimiser, batch and precision: ``resident``, one batch
that already lies on the device, again and again, which is as fast as this network can be trained here; ``bare``, a loop
of ten lines that takes batches from memory; and ours, with the data in memory and with the data on the GPU (``kept``),
where they lie by default as far as they fit. Beside them the device's roof: how fast it multiplies matrices.
Then the local round of each method, as a multiple of Local's, and rounds over FLARE with four hospitals on the device.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from benchmarks.common import OutOption, machine, markdown, write_json
from benchmarks.gpu_flare import flare_rounds
from benchmarks.gpu_methods import method_rounds
from benchmarks.gpu_order import orders, told_of_orders
from benchmarks.gpu_timing import attempted, now
from benchmarks.roofline import operations, peak
from medpfl.cli.terminal import say
from medpfl.core.devices import training_device
from medpfl.core.errors import MedPFLError
from medpfl.data.resident import Resident, bytes_shown
from medpfl.data.samples import Samples, SiteData
from medpfl.methods.contract import Hospital, Site
from medpfl.methods.local import Local
from medpfl.models.dynunet import DynUNet
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular

DYN = (32, 64, 128, 256)
LIMIT = 40.0
"""Seconds after which a setting gets no further turn, so that slow cards are done in ten minutes, too."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What is trained: a task on random samples of a shape."""

    name: str
    task: Any
    shape: tuple[int, ...]
    samples: int
    batch: int


def loads(small: bool) -> list[Load]:
    """Of the sizes that GPUs are bought for, or ``small`` ones of the same kinds."""
    if small:
        return [
            Load("images 64 x 64, UNet",
                 Segmentation("a", size=(64, 64), architecture=UNet((8, 16))), (1, 64, 64), 32, 8),
            Load("volumes 16 x 16 x 16, DynUNet",
                 Segmentation("a", size=(16, 16, 16), spacing=(1, 1, 1), architecture=DynUNet(filters=(4, 8, 8))),
                 (1, 16, 16, 16), 4, 2),
            Load("photographs 48 x 64, ResNet18 of width 8",
                 Classification("a", size=(48, 64), architecture=ResNet(width=8)), (3, 48, 64), 32, 16),
            Load("tables of 32 columns, logistic regression", Tabular("a"), (32,), 256, 32),
        ]  # fmt: skip
    return [
        Load("images 256 x 256, UNet 16-32-64-128-256",
             Segmentation("a", size=(256, 256), architecture=UNet((16, 32, 64, 128, 256), residual_units=2)),
             (1, 256, 256), 512, 32),
        Load("volumes 128 x 128 x 64, DynUNet 32-64-128-256",
             Segmentation("a", size=(128, 128, 64), spacing=(1, 1, 1), architecture=DynUNet(filters=DYN)),
             (1, 128, 128, 64), 16, 2),
        Load("photographs 224 x 224, ResNet18",
             Classification("a", size=(224, 224), architecture=ResNet()), (3, 224, 224), 512, 32),
        Load("tables of 32 columns, logistic regression", Tabular("a"), (32,), 4096, 32),
    ]  # fmt: skip


def measure(repeats: int, small: bool, flare: bool, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Samples a second of the three loops in float32 and bfloat16 (medians), peak memory, and the methods' rounds.

    Args:
        repeats: turns, at least 1; one more warms up.
        flare: whether to start a federation, too.
        keep: is given what was measured so far after every part, so that nothing is lost where time on a GPU ends.
    """
    if repeats < 1:
        raise MedPFLError(f"--repeats must be at least 1, got {repeats}")
    device = training_device()
    kinds = [(load, precision) for load in loads(small) for precision in ("fp32", "bf16")]
    settings: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        "repeats": repeats,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor",
        "threads": torch.get_num_threads(),
        "settings": settings,
    }
    for load, precision in kinds:
        what = {"name": load.name, "batch": load.batch, "precision": precision}
        settings.append(what | attempted(partial(_measured, load, precision, device, repeats)))
        keep(found)
    found["methods"] = attempted(lambda: method_rounds(repeats, *((2, 2) if small else (3, 10))))
    keep(found)
    found["order"] = attempted(lambda: orders(device, repeats, small))
    keep(found)
    found["flare"] = attempted(lambda: flare_rounds(4, *((2, 8) if small else (50, 64)))) if flare else None
    keep(found)
    return found


def _measured(load: Load, precision: str, device: torch.device, repeats: int) -> dict[str, Any]:
    data, method = _data(load), Local(batch_size=load.batch, precision=precision)  # type: ignore[arg-type]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loops, operations_a_sample = _loops(load, data, method, device)
    roof = peak(device, precision, now)
    rates: dict[str, list[float]] = {name: [] for name in loops}
    begun = time.monotonic()
    for turn in range(repeats + 1):
        if turn > 1 and time.monotonic() - begun > LIMIT:
            break
        for name, loop in loops.items():
            started = now(device)
            loop()
            if turn:
                rates[name].append(load.samples / (now(device) - started))
    found = {name: float(np.median(each)) for name, each in rates.items()}
    return {
        "turns": len(rates["ours"]),
        "resident": round(found["resident"], 1),
        "of_roof": float(f"{found['resident'] * operations_a_sample / roof:.3g}"),
        "ours_to_bare": round(found["ours"] / found["bare"], 3),
        "waiting": round(max(0.0, 1 - found["ours"] / found["resident"]), 3),
        "waiting_kept": round(max(0.0, 1 - found["kept"] / found["resident"]), 3),
        "peak_mb": round(torch.cuda.max_memory_allocated(device) / 1e6) if device.type == "cuda" else None,
    }


def _loops(
    load: Load, data: SiteData, method: Local, device: torch.device
) -> tuple[dict[str, Callable[[], None]], float]:
    """The four loops, and how many operations a sample takes."""
    samples = data.splits["train"]
    inputs, targets = samples.inputs[:], samples.targets[:]
    networks = []
    for _ in range(4):
        torch.manual_seed(0)
        networks.append(load.task.network(data).to(device))
    half = method.precision == "bf16"

    def step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, wanted: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            loss = load.task.loss(network(batch), wanted)
        loss.backward()
        optimizer.step()

    starts = range(0, load.samples, load.batch)
    held = inputs[: load.batch].to(device), targets[: load.batch].to(device)
    first, second = (torch.optim.Adam(network.parameters(), lr=method.lr) for network in networks[:2])
    size = bytes_shown(samples, len(samples))
    in_memory, on_device = (
        Hospital(
            task=load.task, data=data, models=nn.ModuleDict({"local": network}), device=device, roster=("a",),
            name="a", seed=0, resident=Resident(device, most, most),
        )
        for network, most in zip(networks[2:], (0, size), strict=True)
    )  # fmt: skip

    def resident() -> None:
        networks[0].train()
        for _ in starts:
            step(networks[0], first, *held)

    def bare() -> None:
        networks[1].train()
        order = torch.randperm(load.samples)
        for start in starts:
            rows = order[start : start + load.batch]
            step(networks[1], second, inputs[rows].to(device), targets[rows].to(device))

    def ours(hospital: Hospital) -> None:
        Site(hospital, method, 1).fit("local")

    counted = operations(lambda: step(networks[0], first, *held)) / load.batch
    both = {"ours": partial(ours, in_memory), "kept": partial(ours, on_device)}
    return {"resident": resident, "bare": bare, **both}, counted


def _data(load: Load) -> SiteData:
    generator = torch.Generator().manual_seed(0)
    masks = isinstance(load.task, Segmentation)
    targets = torch.randint(0, 2, (load.samples, *load.shape[1:]) if masks else (load.samples,), generator=generator)
    names = [str(one) for one in range(load.samples)]
    inputs = torch.randn(load.samples, *load.shape, generator=generator)
    samples = Samples(inputs, targets.to(torch.uint8) if masks else targets, np.arange(load.samples), names)
    return SiteData({"train": samples}, ["a", "b"])


def table_of(results: dict[str, Any]) -> str:
    """Both tables, with what is a ratio said so."""
    rows = [
        [one["name"], str(one["batch"]), one["precision"], *["–"] * 5, one["failed"]]
        if "failed" in one
        else [
            one["name"], str(one["batch"]), one["precision"], f"{one['resident']:.0f}", f"{one['of_roof']:.1%}",
            f"{one['ours_to_bare']:.2f}", f"{one['waiting']:.0%}",
            f"{one['waiting_kept']:.0%}" if "waiting_kept" in one else "–",  # older results have none
            "–" if one["peak_mb"] is None else str(one["peak_mb"]),
        ]
        for one in results["settings"]
    ]  # fmt: skip
    headings = ["what", "batch", "precision", "samples a second", "of the roof", "ours to a bare loop", "waiting",
                "waiting, data on the device", "peak memory, MB"]  # fmt: skip
    methods = [
        [name, ratio if isinstance(ratio, str) else f"{ratio:.2f}"]
        for name, ratio in results.get("methods", {}).items()  # a command that was stopped measured no more
    ]
    return (
        f"On {results['device']}, medians of at most {results['repeats']} turns. Samples a second: with one batch "
        "that lies on the device; of the roof: their operations beside those of the device's fastest product of "
        "matrices; waiting: the part of our loop's time beyond "
        "that of the batch that lies on the device, with the data in memory and with all of them on the device.\n\n"
        + markdown(headings, rows)
        + "\n\nA round of a few hospitals in one process, as a multiple of Local's:\n\n"
        + markdown(["method", "round"], methods)
        + (told_of_orders(results["order"]) if "order" in results else "")
        + (_told(results["flare"]) if results.get("flare") else "")
    )


def _told(rounds: dict[str, Any]) -> str:
    if "failed" in rounds:
        return f"\n\nThe rounds over FLARE failed: {rounds['failed']}"
    return (
        f"\n\nOver FLARE, {rounds['hospitals']} hospitals and a server in processes of their own on this machine, "
        f"SoftPull, ResNet18 of width {rounds['width']}, {rounds['steps']} batches a round: "
        f"{rounds['round_seconds']:.2f} s a round (median without the first), "
        f"{rounds['start_seconds']:.0f} s from the submission to the end of the first."
    )


def command(
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    small: Annotated[bool | None, typer.Option(help="Small networks; default: where there is no GPU.")] = None,
    flare: Annotated[bool, typer.Option(help="Start a federation of four hospitals, too.")] = True,
    out: OutOption = None,
) -> None:
    """Training on this machine's GPU, or processor, beside a bare loop; the methods' rounds; peak memory."""
    facts = machine()
    on_processor = training_device().type == "cpu"
    results = measure(
        repeats, on_processor if small is None else small, flare, lambda found: write_json(out, "gpu", facts, found)
    )
    say(table_of(results))
