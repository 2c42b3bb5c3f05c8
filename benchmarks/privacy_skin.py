# SPDX-License-Identifier: Apache-2.0
"""``benchmarks privacy-skin``: what differential privacy costs three hospitals with images of skin lesions, and whether
joining under it is better than training alone: ``benchmarks.privacy`` on images.

Malignant or benign, at three of HAM10000's four sources; the fourth, vidir_molemax, has 26 malignant images of 3954,
too few to be tested on. At most 1000 images of each, of all diagnoses alike as far as there are as many, 48 x 36
pixels; a small ResNet with group norm from random weights; 8 rounds of 5 steps, plain gradient descent.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import privacy
from benchmarks.common import PlotOption, SeedsOption, machine, write_json
from medpfl.cli.terminal import say
from medpfl.demo.skin import write_skin
from medpfl.models.resnet import ResNet
from medpfl.tasks.classification import Classification

SIZE = (48, 36)  # width and height
IMAGES = 1000
SCORE = "AUC"
SKIN = privacy.Study(
    "skin",
    ("rosendahl", "vidir_modern", "vienna_dias"),
    lambda folder, data: write_skin(folder, data, size=SIZE, images=IMAGES),
    Classification(
        "skin_malignant", size=SIZE[::-1], architecture=ResNet(width=4, depth=10, norm="group"), score="auc"
    ),
    (1.0, 4.0, 16.0),
    ("record",),
    rounds=8,
    steps=5,
    lot=32,
    lr=0.3,
)


def measure(
    data: Path | None, seeds: int, progress: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """As ``privacy.measure``; ``data``: HAM10000 as a ZIP file or a folder."""
    return privacy.measure(data, seeds, progress, SKIN, keep)


def table_of(results: dict[str, Any]) -> str:
    return privacy.table_of(results, SCORE)


def draw(results: dict[str, Any], path: Path) -> None:
    privacy.draw(results, path, SKIN.levels, SCORE)


def command(
    data: Annotated[Path | None, typer.Option(help="HAM10000 as ZIP or folder; default: $MEDPFL_HAM10000.")] = None,
    seeds: SeedsOption = 3,
    out: PlotOption = None,
) -> None:
    """Differential privacy on skin: AUC against epsilon, beside training alone; with --out, a plot beside it."""
    facts = machine()

    def keep(results: dict[str, Any]) -> None:
        write_json(out, "privacy_skin", facts, results)

    results = measure(data, seeds, say, keep)
    if out is not None:
        draw(results, out.with_suffix(".svg"))
    say(table_of(results))
