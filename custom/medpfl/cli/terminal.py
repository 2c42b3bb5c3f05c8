# SPDX-License-Identifier: Apache-2.0
"""What the verbs share: the console and the arguments that several take."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from medpfl.core.errors import for_terminal


class Terminal(Console):
    """A console on which words move no cursor, clear no screen and turn no reading direction, wherever they come from:
    a job, a model's file or a results folder may hold what only a terminal sees. What Rich itself does to it stays."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(for_terminal(segment.text), segment.style)


console = Terminal()

JobArgument = Annotated[str, typer.Argument(help="A job folder, or the name of a shipped job.")]
ModelArgument = Annotated[Path, typer.Argument(help="A deployed model: <model>-<choice>.safetensors at a hospital.")]


def say(text: str) -> None:
    """Print a text as it is, whatever it contains."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
