# SPDX-License-Identifier: Apache-2.0
"""The verb ``medpfl demo``."""

from pathlib import Path
from typing import Annotated

import typer

from medpfl.cli.common import console
from medpfl.core.errors import MedPFLError

app = typer.Typer(no_args_is_help=True, help="Write demo hospitals: their site files, and data where generated.")

FolderArgument = Annotated[Path, typer.Argument(help="Folder to write into.")]


@app.command("phantom")
def demo_phantom(folder: FolderArgument, seed: int = 0) -> None:
    """Four hospitals with generated MR-like phantoms (NIfTI)."""
    from medpfl.demo.phantom import write_phantoms

    console.print(f"{folder}: {', '.join(write_phantoms(folder, seed))}")


@app.command("heart")
def demo_heart(
    folder: FolderArgument,
    data: Annotated[Path | None, typer.Option(help="Folder with the processed.*.data files.")] = None,
    split: Annotated[str, typer.Option(help="validated or flamby")] = "validated",
) -> None:
    """The four hospitals of the UCI heart-disease data."""
    from medpfl.demo.heart import SPLITS, write_heart

    if split not in SPLITS:
        raise MedPFLError(f"--split must be {' or '.join(SPLITS)}, got '{split}'")
    console.print(f"{folder}: {', '.join(write_heart(folder, data, split))}")
