# SPDX-License-Identifier: Apache-2.0
"""Of ``benchmarks gpu``: volumes whose channels lie side by side in memory ("channels last"), beside the plain order.

MedPFL's networks take volumes in the plain order. Whether the other one pays depends on the card and on the layers:
this measures both, so that it can be decided by numbers.
"""

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common import markdown
from benchmarks.gpu_timing import attempted, now
from medpfl.models.contract import Architecture
from medpfl.models.dynunet import DynUNet
from medpfl.models.memory_order import faulty_here
from medpfl.models.segresnet import SegResNet
from medpfl.models.unet import UNet

_STEPS = 5
LIMIT = 20.0
"""Seconds after which a network gets no further turn."""
_ORDERS = {"plain": torch.contiguous_format, "last": torch.channels_last_3d}


def orders(device: torch.device, repeats: int, small: bool) -> dict[str, Any]:
    """Milliseconds of a training step in each order, and how far the first losses are apart, by network.

    Args:
        repeats: turns of a few steps, at least 1, of which medians are taken; one more warms up.
    """
    if device.type == "cpu" and faulty_here():
        return {"failed": "on this processor, torch's convolutions may damage memory in this order"}
    widths = (4, 8, 8) if small else (32, 64, 128, 256)
    networks: dict[str, Architecture] = {
        "UNet, BatchNorm": UNet(widths, residual_units=2, norm="batch"),
        "SegResNet, GroupNorm": SegResNet(init_filters=8 if small else 32),
        "DynUNet, InstanceNorm": DynUNet(filters=widths),
    }
    shape = (1, 16, 16, 16) if small else (1, 128, 128, 64)
    return {
        f"{name}, {precision}": attempted(partial(_both, one, shape, precision, device, repeats))
        for name, one in networks.items()
        for precision in ("fp32", "bf16")
    }


def _both(
    architecture: Architecture, shape: tuple[int, ...], precision: str, device: torch.device, repeats: int
) -> dict[str, Any]:
    inputs, networks, first = torch.randn(2, *shape), {}, {}
    for order in _ORDERS:
        torch.manual_seed(0)
        networks[order] = architecture.build(shape, 2).to(device)
        networks[order].to(memory_format=_ORDERS[order])  # type: ignore[call-overload]
    optimizers = {order: torch.optim.SGD(network.parameters(), lr=1e-3) for order, network in networks.items()}
    batches = {order: inputs.to(device=device, memory_format=kind) for order, kind in _ORDERS.items()}

    def step(order: str) -> torch.Tensor:
        optimizers[order].zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            outputs = networks[order](batches[order])
            loss = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).float().square().mean()
        loss.backward()
        optimizers[order].step()
        return loss.detach()

    taken: dict[str, list[float]] = {order: [] for order in _ORDERS}
    begun = time.monotonic()
    for turn in range(repeats + 1):
        if turn > 1 and time.monotonic() - begun > LIMIT:
            break
        for order in _ORDERS:
            started = now(device)
            losses = [step(order) for _ in range(_STEPS)]
            ended = now(device)
            if turn:
                taken[order].append((ended - started) / _STEPS)
            else:
                first[order] = float(losses[0])
    found = {order: round(float(np.median(each)) * 1000, 3) for order, each in taken.items()}
    apart = abs(first["last"] - first["plain"]) / max(abs(first["plain"]), 1e-12)
    return {**found, "apart": float(f"{apart:.2g}")}


def told_of_orders(found: dict[str, Any]) -> str:
    """The table."""
    heading = "\n\nA training step of volumes, plain and with their channels side by side (channels last):\n\n"
    if "failed" in found:
        return f"{heading}not measured: {found['failed']}"
    rows = [
        [name, *["–"] * 3, one["failed"]]
        if "failed" in one
        else [name, *(f"{one[order]:.1f}" for order in _ORDERS), f"{one['plain'] / one['last']:.2f}", str(one["apart"])]
        for name, one in found.items()
    ]
    return heading + markdown(
        ["network, precision", "plain, ms", "channels last, ms", "times as fast", "first losses apart by"], rows
    )
