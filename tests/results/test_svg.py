# SPDX-License-Identifier: Apache-2.0
"""Figures are small SVG: each style once, under names that no other figure in the same page has."""

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from medpfl.results.svg import svg_text

pytestmark = pytest.mark.usefixtures("rendered")


def picture(height: float) -> str:
    figure = Figure(figsize=(3, 2))
    axes = figure.add_subplot()
    axes.plot([0, 1, 2], [0, height, 1], label="one")
    axes.plot([0, 1, 2], [1, 0, height], linestyle="--", label="other")
    axes.legend()
    return svg_text(figure)


def test_a_style_is_written_once() -> None:
    text = picture(1.5)
    ElementTree.fromstring(text)  # it is XML
    rules = dict(re.findall(r"\.(f[\w-]+)\{([^}]*)\}", text))
    used = re.findall(r'class="([^"]*)"', text)
    assert set(used) == set(rules) and len(used) > 2 * len(rules)
    styles = re.findall(r'style="([^"]*)"', text)
    assert len(set(styles)) == len(styles) and not set(styles) & set(rules.values())
    assert sum("stroke-dasharray: 5.55,2.4" in rule for rule in (*rules.values(), *styles)) == 1  # the dashed line's


def test_figures_of_one_page_have_classes_of_their_own() -> None:
    first, second = (set(re.findall(r"\.(f[\w-]+)\{", picture(height))) for height in (1.5, 2.5))
    assert first and second and not first & second
    assert picture(1.5) == picture(1.5)


def test_nothing_is_written_that_is_not_drawn() -> None:
    text = picture(1.5)
    assert "<!--" not in text and "<metadata" not in text
    named, meant = set(re.findall(r' id="([^"]*)"', text)), set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    assert named and named == meant  # tick marks and clip paths


@pytest.mark.parametrize(
    "name",
    ['a style="x}body{display:none"', 'a d="1.23456"', 'a id="b"', "a font-family: 'DejaVu Sans', b, sans-serif"],
)
def test_a_name_is_text_whatever_it_looks_like(name: str) -> None:
    """A hospital's with a style became a rule of the whole page, which could hide figures or load an address."""
    figure = Figure(figsize=(3, 2))
    axes = figure.add_subplot()
    axes.set_title(name)
    axes.set_xlabel(name)
    text = svg_text(figure)
    found = [(one.tag.rpartition("}")[2], "".join(one.itertext())) for one in ElementTree.fromstring(text).iter()]
    assert found.count(("text", name)) == 2
    assert not any("display" in words for tag, words in found if tag == "style")
