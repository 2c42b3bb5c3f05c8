# SPDX-License-Identifier: Apache-2.0
"""Verbs for MONAI bundles."""

import json
from pathlib import Path
from typing import Annotated

import typer

from medpfl.cli.terminal import say

app = typer.Typer(no_args_is_help=True, help="MONAI bundles as start weights.")


@app.callback()
def bundles() -> None:
    """MONAI bundles as start weights."""


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A MONAI bundle: a folder with configs and models.")],
    out: Annotated[Path, typer.Option("--out", help="The checkpoint, a new .safetensors file.")],
) -> None:
    """Write a bundle's weights as a checkpoint that site files can declare, and print the network for the job.

    The network must be one that MedPFL knows; nothing of the bundle is run."""
    from medpfl.deployed.bundle_import import import_bundle

    done = import_bundle(folder, out)
    say(json.dumps({"architecture": done.architecture}, indent=2))
    say(f"for {done.channels} channels and {done.outputs} outputs; {out}: SHA-256 {done.sha256}")
