# SPDX-License-Identifier: Apache-2.0
"""Verbs for the key that the hospitals of a federation share."""

from pathlib import Path
from typing import Annotated

import typer

from medpfl.cli.terminal import say

app = typer.Typer(no_args_is_help=True, help="The hospitals' common key, for jobs that encrypt models.")


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Folder to put the key in; not on the server's machine.")],
) -> None:
    """Make the key that all hospitals of a federation share and the server never gets."""
    from medpfl.privacy.keys import make_key

    path, key = make_key(folder)
    say(f"wrote {path}, fingerprint {key.fingerprint}")
    say(
        "Carry it to every hospital as you would a password, never by the federation's server. There: chmod 600, and "
        f"name it in the site file ('keys: {path.name}'). Compare the fingerprints by telephone: medpfl keys show FILE"
    )


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A key that 'medpfl keys make' wrote.")]) -> None:
    """Print a key's fingerprint, after a look at who may read its file."""
    from medpfl.privacy.keys import read_key

    say(read_key(file).fingerprint)
