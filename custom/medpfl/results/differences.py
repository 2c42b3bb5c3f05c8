# SPDX-License-Identifier: Apache-2.0
"""How hospitals' models differ, and the graph of similar hospitals, where a server component has one (``links``)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def sdwd(states: Sequence[Mapping[str, Tensor]]) -> NDArray[np.float64]:
    """Standard deviation of weights' difference (Zhao et al., pFedNet, Fig. 7): of every value of K hospitals' models
    the deviation over the hospitals (divided by K) from their mean. Counters are left out."""
    keys = sorted(key for key, tensor in states[0].items() if tensor.is_floating_point())
    stacked = torch.stack([torch.cat([state[key].reshape(-1).double() for key in keys]) for state in states])
    found: NDArray[np.float64] = stacked.std(dim=0, correction=0).numpy()
    return found


def sdwd_of_slots(results: Path, slots: Mapping[str, str]) -> dict[str, list[float]]:
    """Slot to quantiles (``QUANTILES``) of the SDWD of its models after the last round; only slots of which every
    hospital has its own, and whose file is there.

    Args:
        slots: of the job, each with the SHA-256 of its file. Whatever else lies there is of another job.

    Raises:
        MedPFLError: a slot's file cannot be read, is another one, or was altered.
    """
    found, files = {}, {file.stem: file for file in sorted((results / "slots").glob("*.safetensors"))}
    for slot, file in files.items():
        if slot not in slots:
            continue
        if store.file_digest(file) != slots[slot]:
            raise MedPFLError(f"{file} is not the one that the job left: its SHA-256 is not that of summary.json")
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in store.read(file)[0].items():
            owner, _, key = name.partition("::")
            states.setdefault(owner, {})[key] = tensor
        each = {_entries(state) for state in states.values()}
        if len(each) > 1:
            raise MedPFLError(f"{file} was altered: the hospitals' models in it have different entries")
        if len(states) > 1 and any(shape.numel() for _, shape in each.pop()):
            found[slot] = [float(value) for value in np.quantile(sdwd(list(states.values())), QUANTILES)]
    return found


def _entries(state: Mapping[str, Tensor]) -> tuple[tuple[str, torch.Size], ...]:
    """Of a model what differs from hospital to hospital by its values alone; counters are left out."""
    return tuple(sorted((key, tensor.shape) for key, tensor in state.items() if tensor.is_floating_point()))


def draw_boxes(axis: Any, boxes: Mapping[str, Sequence[float]]) -> None:
    """Quantiles as boxes on a logarithmic axis; what does not differ at all has none."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    shown = {label: values for label, values in boxes.items() if values[-1] > 0}
    stats = [
        dict(
            zip(("whislo", "q1", "med", "q3", "whishi"), np.maximum(values, 1e-12), strict=True), label=label, fliers=[]
        )
        for label, values in shown.items()
    ]
    axis.bxp(stats, orientation="horizontal", showfliers=False)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # its own writes formulas, which are shown as they are
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("standard deviation of weights' difference")
    axis.tick_params(labelsize=8)


def draw_graph(
    axis: Any, roster: Sequence[str], pairs: Sequence[Sequence[str]], matrix: NDArray[np.float64] | None
) -> None:
    """The hospitals on a circle with their edges, as thick as they hear each other by ``matrix``."""
    angle = 2 * np.pi * np.arange(len(roster)) / len(roster) + np.pi / 2
    place = dict(zip(roster, np.stack([np.cos(angle), np.sin(angle)], axis=1), strict=True))
    index = {name: number for number, name in enumerate(roster)}
    for one, other in pairs:
        weight = (
            0.3 if matrix is None else float(matrix[index[one], index[other]] + matrix[index[other], index[one]]) / 2
        )
        ends = np.stack([place[one], place[other]], axis=1)
        axis.plot(*ends, color="#1f6fb4", linewidth=0.6 + 8 * weight, alpha=0.6, zorder=1)
    for name, (x, y) in place.items():
        axis.scatter(x, y, 60, color="#222222", zorder=2)
        side = "left" if x > 0.3 else "right" if x < -0.3 else "center"
        axis.annotate(name, (1.12 * x, 1.15 * y), ha=side, va="center", fontsize=8)
    axis.set_xlim(-1.9, 1.9)
    axis.set_ylim(-1.4, 1.4)
    axis.set_aspect("equal")
    axis.axis("off")
