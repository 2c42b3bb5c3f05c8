# SPDX-License-Identifier: Apache-2.0
"""Figures as small SVG: text stays text, places have two decimals of a point, and the same figure the same bytes."""

import io
import re
from typing import Any

_PLACES = re.compile(r'\b(?:d|x|y|transform|points)="[^"]*"')
_LONG = re.compile(r"-?\d+\.\d{3,}")
_FONTS = re.compile(r"font-family: 'DejaVu Sans', [^;\"]*sans-serif")


def svg_text(figure: Any, transparent: bool = False) -> str:
    """A matplotlib figure as the text of an ``<svg>`` element.

    Args:
        transparent: whether what lies behind it shows through; else it is white.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "medpfl", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white", transparent=transparent)
    text = re.sub(r"\n *", "\n", buffer.getvalue())
    text = _FONTS.sub("font-family: 'DejaVu Sans', sans-serif", text)  # every text names nine fonts
    return _PLACES.sub(lambda place: _LONG.sub(_short, place[0]), text[text.index("<svg") :])


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
