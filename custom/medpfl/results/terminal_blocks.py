# SPDX-License-Identifier: Apache-2.0
"""Tables on a terminal: where not all columns fit beside each other, further tables below repeat the first one."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

WIDEST = 36
"""Columns; what is longer is written in several lines."""
_BORDER = 3  # a space at either side and a line


def print_table(
    console: Console,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    closing: Sequence[Sequence[str]] = (),
    marked: bool = False,
) -> None:
    """Print a table whose numbers are never broken, however narrow the window.

    Args:
        rows, closing: lines of as many cells as ``head``; a rule parts the closing ones from the others.
        marked: whether cells hold Rich's markup.
    """
    write = str if marked else escape
    lines = [[write(cell) for cell in row] for row in (*rows, *closing)]
    widths = [
        min(WIDEST, max(_width(cell) for cell in (escape(name), *(line[place] for line in lines))))
        for place, name in enumerate(head)
    ]
    for number, block in enumerate(_blocks(widths, console.width - 1)):
        table = Table(title=escape(title) if not number else None)
        for place in (0, *block):
            table.add_column(escape(head[place]), justify="right" if place else "left", overflow="fold")
        for place, line in enumerate(lines):
            if closing and place == len(rows):
                table.add_section()
            table.add_row(*(line[column] for column in (0, *block)))
        console.print(table)


def _width(cell: str) -> int:
    return max(Text(line.plain).cell_len for line in Text.from_markup(cell).split(allow_blank=True))


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Which columns stand beside each other; each block has at least one besides the first column."""
    first = widths[0] + _BORDER
    found: list[list[int]] = [[]]
    taken = first
    for place, width in enumerate(widths[1:], start=1):
        if found[-1] and taken + width + _BORDER > room:
            found.append([])
            taken = first
        found[-1].append(place)
        taken += width + _BORDER
    return found
