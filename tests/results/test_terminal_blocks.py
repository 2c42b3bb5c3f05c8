# SPDX-License-Identifier: Apache-2.0
"""Tables in a narrow window: no line is too long, and no number is broken."""

import io

import pytest
from rich.console import Console

from medpfl.results.terminal_blocks import WIDEST, print_table

HEAD = ["method", "best round", "last round", "gain over Local", "worst-off hospital", "scored after"]
ROWS = [
    ["FedAvg", "0.654 ± 0.016", "0.606 ± 0.025", "-0.027 [-0.064, 0.005]", "rosendahl 0.645", "mixing"],
    ["Local [alone]", "0.681 ± 0.020", "0.620 ± 0.016", "", "rosendahl 0.678", "local steps"],
]


def printed(width: int, **more: object) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_table(console, "gains", HEAD, ROWS, **more)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_every_cell_stands_whole_in_one_line(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    for row in (HEAD, *ROWS):
        for cell in row:
            assert any(cell in line for line in lines)


def test_every_block_repeats_the_first_column_and_as_few_are_made_as_fit() -> None:
    for width, blocks in ((200, 1), (80, 2), (40, 5)):
        lines = printed(width)
        assert sum("FedAvg" in line for line in lines) == sum("method" in line for line in lines) == blocks
        assert sum("gains" in line for line in lines) == 1


def test_long_text_is_folded_between_words_and_closing_lines_are_parted() -> None:
    words = "rounds of local training that nothing else has, their number chosen by validation"
    lines = printed(80, closing=[["mean", "0.668", "0.613", "", "", words]])
    assert max(map(len, lines)) <= 80 and len(words) > WIDEST
    assert "".join("".join(line.strip("│ ") + " " for line in lines)).count("chosen by validation") == 1
    assert any(line.startswith("├") for line in lines)


@pytest.mark.parametrize("width", [60, 79, 80, 200])
def test_a_long_name_is_folded_and_never_cut_off(width: int) -> None:
    """Two sites of one hospital were both called "universitaetsklinikum-schleswig-hol…"."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    names = [f"universitaetsklinikum-schleswig-holstein-{campus}" for campus in ("kiel", "luebeck")]
    assert min(map(len, names)) > WIDEST
    print_table(
        console, "test", ["hospital", "training samples", "scored after all"], [[name, "9", "0.8"] for name in names]
    )
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    first = "".join(line[2:].partition("│")[0].rstrip() for line in lines if line.startswith("│"))
    assert all(name in first for name in names), first
