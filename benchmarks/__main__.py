# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' command, run from a checkout: ``python -m benchmarks``.

A verb is a module with a function ``command``, imported when it is asked for: a new benchmark is one file."""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from benchmarks import split
from benchmarks.scale_plot import figure_of
from benchmarks.tables import joined, keep, tables_of
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.results.compact import compact


def verbs() -> dict[str, str]:
    """Verb to its module."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    names = [file.stem for file in files if "\ndef command(" in file.read_text(encoding="utf-8")]
    return {name.replace("_", "-"): f"benchmarks.{name}" for name in names}


class Verbs(TyperGroup):
    """Those of this file, and one for each module that has a command."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*super().list_commands(ctx), *verbs()]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]
        module = verbs().get(cmd_name)
        if module is None:
            return super().get_command(ctx, cmd_name)  # type: ignore[return-value]
        one = typer.Typer(add_completion=False)
        one.command(cmd_name)(importlib.import_module(module).command)
        return typer.main.get_command(one)  # type: ignore[return-value]


app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Benchmarks; each prints its numbers as ratios inside one run.")
app.add_typer(split.app, name="split")


@app.command("table")
def table(
    file: Annotated[Path, typer.Argument(help="A result: docs/results/mixing.json, a comparison's .json.xz.")],
) -> None:
    """Print a stored result's tables as Markdown, without measuring anything."""
    say(tables_of(file))


@app.command("join")
def join(
    files: Annotated[list[Path], typer.Argument(help="Results of one benchmark.")],
    out: Annotated[Path, typer.Option(help="JSON file for all of them.")],
    plot: Annotated[Path | None, typer.Option(help="SVG file, of those of `scale`.")] = None,
) -> None:
    """Put a benchmark's results into one file, without measuring anything."""
    content = joined(files)
    write_text(out, compact(content))
    if plot is not None:
        write_text(plot, figure_of(content))
    say(tables_of(out))


@app.command("keep")
def keep_(
    file: Annotated[Path, typer.Argument(help="A comparison's results.json, or a stored one.")],
    out: Annotated[Path, typer.Argument(help="The file to keep: docs/results/compare-NAME.json.xz.")],
) -> None:
    """Store a comparison's results small, with the same tables."""
    keep(file, out)


def main() -> None:
    """A MedPFLError is one sentence on stderr and exit code 1, as of ``medpfl``."""
    try:
        app(prog_name="python -m benchmarks")
    except MedPFLError as error:
        Console(stderr=True).print(f"benchmarks: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
