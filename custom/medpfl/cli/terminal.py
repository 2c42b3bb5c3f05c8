# SPDX-License-Identifier: Apache-2.0
"""What the verbs share: the console and the arguments that several take."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

JobArgument = Annotated[str, typer.Argument(help="A job folder, or the name of a shipped job.")]
ModelArgument = Annotated[Path, typer.Argument(help="A deployed model: <model>-<choice>.safetensors at a hospital.")]


def counted(number: int, what: str) -> str:
    """ "1 case", "2 cases"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def say(text: str) -> None:
    """Print a text as it is, whatever it contains."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
