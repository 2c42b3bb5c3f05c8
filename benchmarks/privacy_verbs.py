# SPDX-License-Identifier: Apache-2.0
"""The verbs ``privacy`` and ``privacy-skin``: what differential privacy costs, on heart and on skin."""

from pathlib import Path
from typing import Annotated, Any

import typer

from medpfl.cli.terminal import say

SeedsOption = Annotated[int, typer.Option(help="Number of seeds.")]
OutOption = Annotated[Path | None, typer.Option(help="JSON file for the numbers; a plot is written beside it.")]


def heart(
    data: Annotated[Path | None, typer.Option(help="Folder with the UCI processed.*.data files.")] = None,
    seeds: SeedsOption = 5,
    out: OutOption = None,
) -> None:
    """Differential privacy on heart: accuracy against epsilon, beside training alone; with --out, a plot beside it."""
    from benchmarks import common, privacy

    facts = common.machine()
    results = privacy.measure(data, seeds, say)
    common.write_json(out, "privacy", facts, results)
    if out is not None:
        privacy.draw(results, out.with_suffix(".svg"))
    say(privacy.table_of(results))


def skin(
    data: Annotated[Path | None, typer.Option(help="HAM10000 as ZIP or folder; default: $MEDPFL_HAM10000.")] = None,
    seeds: SeedsOption = 3,
    out: OutOption = None,
) -> None:
    """Differential privacy on skin: AUC against epsilon, beside training alone; with --out, a plot beside it."""
    from benchmarks import common, privacy_skin

    facts = common.machine()

    def keep(results: dict[str, Any]) -> None:
        common.write_json(out, "privacy_skin", facts, results)

    results = privacy_skin.measure(data, seeds, say, keep)
    if out is not None:
        privacy_skin.draw(results, out.with_suffix(".svg"))
    say(privacy_skin.table_of(results))
