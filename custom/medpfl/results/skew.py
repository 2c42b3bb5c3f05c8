# SPDX-License-Identifier: Apache-2.0
"""Which hospital has how many cases of which class, as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def draw_label_counts(counts: Mapping[str, Sequence[int]], classes: Sequence[str]) -> Any:
    """A matplotlib figure: hospitals from left to right, classes upwards, the area of a bubble is the number of cases.

    Args:
        counts: hospital to the number of cases of each class.
    """
    from matplotlib.figure import Figure

    table = np.array([list(values) for values in counts.values()], dtype=float)
    height = max(2.2, 0.26 * len(classes) + 1.2) + max(0.0, 0.056 * max(map(len, counts)) - 0.8)  # names are aslant
    width = max(3.6, 0.32 * len(table) + 1.8) + max(0.0, 0.065 * max(map(len, classes)) - 1.4)
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    x, y = np.meshgrid(np.arange(len(table)), np.arange(len(classes)), indexing="ij")
    axis.scatter(x, y, s=180 * table / max(table.max(), 1), color="#1f6fb4")
    axis.set_xticks(range(len(table)), list(counts), rotation=60, ha="right", fontsize=7)
    axis.set_yticks(range(len(classes)), list(classes), fontsize=7)
    axis.set_xlim(-0.7, len(table) - 0.3)
    axis.set_ylim(-0.7, len(classes) - 0.3)
    axis.set_title(f"cases by class (largest bubble: {int(table.max())})", fontsize=8)
    axis.grid(alpha=0.2)
    return figure
