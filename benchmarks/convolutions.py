# SPDX-License-Identifier: Apache-2.0
"""The verb ``convolutions``; the sweep itself is a script, whose process imports torch and little else."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import convolution_sweep
from medpfl.cli.terminal import say


def command(
    out: Annotated[Path | None, typer.Option(help="File to append to, a line for each convolution at fault.")] = None,
    order: Annotated[str, typer.Option(help="channels_last or contiguous.")] = "channels_last",
    table: Annotated[Path | None, typer.Option(help="Only print the table of an earlier sweep.")] = None,
) -> None:
    """Which convolutions write outside their memory on this processor (needs a C compiler; a few minutes)."""
    if (out is None) == (table is None) or order not in ("channels_last", "contiguous"):
        raise typer.BadParameter("give either --out or --table; the order is channels_last or contiguous")
    if table is not None:
        say(convolution_sweep.table_of(table))
    elif out is not None:
        raise typer.Exit(convolution_sweep.guarded_sweep(out, order))
