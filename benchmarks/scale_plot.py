# SPDX-License-Identifier: Apache-2.0
"""The plot of ``benchmarks join``: what ``benchmarks scale`` measured, against hospitals and size, with the limits.
Drawn by hand, because matplotlib's SVG of it is six times as large and docs/results is to stay small.

The limit of time is what the disk takes to write the models as often as a round writes them, at the speed that a plain
write had in the same process; that of memory is what must be held, or what a server in files may take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medpfl.core.errors import MedPFLError

Point = dict[str, Any]
ALLOWED = 537.0  # MB, 512 MiB
WIDTH, HEIGHT = 240, 150  # of a panel's axes
STYLES = {
    "server": 'stroke="#1f77b4"',
    "whole": 'stroke="#ff7f0e"',
    "other": 'stroke="#2ca02c" stroke-width="0"',
    "limit": 'stroke="#d62728" stroke-dasharray="4 3"',
}


@dataclass(frozen=True)
class Row:
    """Values of a panel that belong together; ``style``: of ``STYLES``."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]


def figure_of(results: dict[str, Any]) -> str:
    """Four panels as SVG, of a result and those that it was joined with.

    Raises:
        MedPFLError: it is none of ``benchmarks scale``.
    """
    if results.get("bench") != "scale":
        raise MedPFLError(f"--plot: expected results of the benchmark 'scale', got '{results.get('bench')}'")
    points: list[Point] = [point for each in (results, *results.get("others", ())) for point in each["points"]]
    # Where hospitals are busy the checkpoint costs the round no time: another curve.
    server = [p for p in points if p["kind"] == "server" and "failed" not in p and not p.get("busy")]
    memory = [p for p in server if not p["on_disk"] and p["megabytes"] == 4.0 and p["mixer"] == "SoftPull"]
    files = [p for p in server if p["on_disk"] and p["hospitals"] == 20 and p["mixer"] == "SoftPull"]
    mixed = [p for p in server if p["on_disk"] and p["hospitals"] == 20 and p["mixer"] != "SoftPull"]
    others = list({(p["mixer"], p["megabytes"]): p for p in mixed}.values())  # measured again: the last counts
    whole = [p for p in points if p["kind"] == "simulate" and not p["on_disk"] and not p["hidden"] and p["rounds"] == 6]
    panels = []
    for unit, value in (("s a round", "seconds_a_round"), ("peak, MB", "peak_mb")):
        seconds = value == "seconds_a_round"
        limits = [_written(p, 1) if seconds else p["before_mb"] + 2 * p["hospitals"] * p["megabytes"] for p in memory]
        rows = [
            Row("server, models of 4 MB", "server", _of(memory, "hospitals", value)),
            Row("simulate, small tables", "whole", _of(whole, "hospitals", value)),
            Row("plain write" if seconds else "two models of each", "limit", _beside(memory, "hospitals", limits)),
        ]
        panels.append(("hospitals", unit, rows))
        limits = [_written(p, 2) if seconds else 1.5 * p["megabytes"] + ALLOWED for p in files]
        label = "plain write, twice" if seconds else "1.5 models + 512 MiB"
        rows = [
            Row("20 hospitals, in files", "server", _of(files, "megabytes", value)),
            Row("mixed otherwise", "other", _of(others, "megabytes", value)),
            Row(label, "limit", _beside(files, "megabytes", limits)),
        ]
        panels.append(("model, MB", unit, rows))
    drawn = [
        f'<g transform="translate({50 + number % 2 * 310} {15 + number // 2 * 205})">\n{_panel(*panel)}</g>'
        for number, panel in enumerate(panels)
    ]
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 410" font-family="sans-serif" font-size="9">'
    return "\n".join([head, '<rect width="620" height="410" fill="#fff"/>', *drawn, "</svg>\n"])


def _written(point: Point, times: int) -> float:
    """Seconds that a plain write of all hospitals' models takes."""
    return float(times * point["hospitals"] * point["megabytes"] / 1e3 / point["disk_write_gb_s"])


def _of(points: Sequence[Point], axis: str, value: str) -> list[tuple[float, float]]:
    return sorted((point[axis], point[value]) for point in points)


def _beside(points: Sequence[Point], axis: str, values: Sequence[float]) -> list[tuple[float, float]]:
    return sorted((point[axis], value) for point, value in zip(points, values, strict=True))


def _panel(across: str, up: str, rows: Sequence[Row]) -> str:
    """A panel with logarithmic axes."""
    found = [place for row in rows for place in row.points]
    left, right = _span([x for x, _ in found])
    low, high = _span([y for _, y in found])

    def place(x: float, y: float) -> tuple[float, float]:
        along = WIDTH * (math.log10(x) - left) / (right - left)
        return round(along, 1), round(HEIGHT - HEIGHT * (math.log10(y) - low) / (high - low), 1)

    drawn = [f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#000"/>']
    for x in _ticks(left, right):
        at = place(x, 10**low)[0]
        drawn.append(f'<text x="{at}" y="{HEIGHT + 11}" text-anchor="middle">{x:g}</text>')
    for y in _ticks(low, high):
        at = place(10**left, y)[1]
        drawn.append(
            f'<path d="M0 {at}H{WIDTH}" stroke="#ddd"/><text x="-4" y="{at + 3}" text-anchor="end">{y:g}</text>'
        )
    drawn.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 23}" text-anchor="middle">{across}</text>')
    drawn.append(f'<text transform="translate(-34 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{up}</text>')
    for number, row in enumerate(row for row in rows if row.points):
        places = [place(x, y) for x, y in row.points]
        drawn.append(f'<g fill="none" {STYLES[row.style]}><path d="M{" ".join(f"{x} {y}" for x, y in places)}"/>')
        down = 8 + 11 * number
        if row.style != "limit":
            dots = "".join(f"M{x - 2} {y}a2 2 0 1 0 4 0a2 2 0 1 0-4 0" for x, y in [*places, (14, down)])
            drawn.append(f'<path d="{dots}" stroke-width="1"/>')
        drawn.append(f'<path d="M6 {down}h16"/></g><text x="26" y="{down + 3}">{row.label}</text>')
    return "\n".join(drawn) + "\n"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms of a little less than the least and a little more than the largest; above is room for the labels."""
    low, high = math.log10(min(values)), math.log10(max(values))
    return low - 0.05 * (high - low + 0.1), high + 0.3 * (high - low + 0.1)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within a span, or the powers alone where those are many."""
    steps = (1.0,) if high - low > 2.5 else (1.0, 2.0, 5.0)
    every = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in every if low <= math.log10(value) <= high]
