# SPDX-License-Identifier: Apache-2.0
"""Figures as small SVG: text stays text, places have two decimals of a point, and the same figure the same bytes."""

import hashlib
import io
import re
import warnings
from collections import Counter
from typing import Any

_PLACES = re.compile(r'\b(?:d|x|y|transform|points)="[^"]*"')
_LONG = re.compile(r"-?\d+\.\d{3,}")
_ASIDE = re.compile(r"<!--.*?-->\n?|<metadata>.*?</metadata>\n?", re.DOTALL)
_WORDS = re.compile(r">[^<>]+<")
"""Between tags: names of hospitals and models, which may look like what a tag holds."""
_MEANT = re.compile(r'(?:url\(#|href="#)([^")]+)')
_NAME = re.compile(r' id="([^"]*)"')
_STYLE = re.compile(r'\bstyle="([^"]*)"')
_FOREIGN = r"(?s)Glyph .* missing from"
"""Of a letter that matplotlib's own font does not have, a Chinese one say: a browser has others."""
_FONTS = re.compile(r"font-family: 'DejaVu Sans', [^;\"]*sans-serif")


def in_two_lines(label: str, most: int = 30) -> str:
    """A label for the height of a figure, which cuts what is longer: "validation mae (mmol/L, lower is better)"."""
    return label.replace(" (", "\n(", 1) if len(label) > most else label


def plain_numbers(*axes: Any) -> None:
    """Scores are written out, without a power of ten or a number to add above the axis."""
    for axis in axes:
        axis.ticklabel_format(axis="y", style="plain", useOffset=False)


def legend_below(axis: Any, size: int) -> None:
    """What the lines of an axis are, below its figure: in as many columns as the figure is wide enough for, and the
    figure is so much higher."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = axis.figure
    canvas: Any = FigureCanvasAgg(figure)
    for columns in (3, 2, 1):
        legend = figure.legend(
            *axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=size, frameon=False
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _FOREIGN)
            extent = legend.get_window_extent(canvas.get_renderer())
        if extent.width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + extent.height / figure.dpi)


def svg_text(figure: Any, transparent: bool = False) -> str:
    """A matplotlib figure as the text of an ``<svg>`` element.

    Args:
        transparent: whether what lies behind it shows through; else it is white.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "medpfl", "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _FOREIGN)
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white", transparent=transparent)
    text = _ASIDE.sub("", re.sub(r"\n *", "\n", buffer.getvalue()))
    text = _WORDS.sub(lambda words: words[0].replace('"', "&quot;").replace("'", "&#39;"), text)
    text = _FONTS.sub("font-family: 'DejaVu Sans', sans-serif", text)  # every text names nine fonts
    return _styles_once(_PLACES.sub(lambda place: _LONG.sub(_short, place[0]), _bare(text[text.index("<svg") :])))


def _bare(text: str) -> str:
    """Without names of elements to which nothing refers."""
    meant = set(_MEANT.findall(text))
    return _NAME.sub(lambda found: found[0] if found[1] in meant else "", text)


def _styles_once(text: str) -> str:
    """Each style once, as a class: matplotlib writes it at every element. Several figures may stand in one page, so the
    classes' names are the figure's own."""
    uses = Counter(_STYLE.findall(text))
    name = "f" + hashlib.sha256(text.encode()).hexdigest()[:6]
    classes = {style: f"{name}-{index}" for index, style in enumerate(one for one in uses if uses[one] > 1)}
    text = _STYLE.sub(lambda found: f'class="{classes[found[1]]}"' if found[1] in classes else found[0], text)
    rules = "".join(f".{one}{{{style}}}" for style, one in classes.items())
    return text.replace(">\n", f">\n<style>{rules}</style>\n", 1) if rules else text


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
