# SPDX-License-Identifier: Apache-2.0
"""``benchmarks mirroring``: what nnU-Net's augmentation, with and without its mirroring, does to a small network that
trains for a short time: the hippocampus volumes of all sources in one place."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.common import machine, markdown, write_json
from medpfl.augment.contract import Augmentation
from medpfl.augment.presets import preset
from medpfl.augment.spatial import Flip
from medpfl.cli.common import say
from medpfl.compare.pooled import Together
from medpfl.core.errors import MedPFLError
from medpfl.core.seeding import seed_torch
from medpfl.data.site_file import load_site_file
from medpfl.demo.hippocampus import write_hippocampus
from medpfl.deployed.evaluate import evaluate_test
from medpfl.methods.contract import Hospital, Site, Span
from medpfl.methods.local import Local
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation

SIZE = (40, 56, 40)
ARMS: dict[str, Callable[[], tuple[Augmentation, ...]]] = {
    "none": tuple,
    "mirroring of one axis, posterior-anterior": lambda: (Flip(1),),
    "mirroring of all three axes": lambda: (Flip(0), Flip(1), Flip(2)),
    "`nnunet`": lambda: preset("nnunet", SIZE),
    "`nnunet_no_mirroring`": lambda: preset("nnunet_no_mirroring", SIZE),
}


def measure(data: Path | None, rounds: int, seed: int) -> dict[str, Any]:
    """Dice of each arm on the training volumes as they are, and on the test volumes: the mean of the three sources.

    Args:
        data: as for ``medpfl demo hippocampus``.
        rounds: passes over the training volumes.
    """
    if rounds < 1:
        raise MedPFLError(f"--rounds must be at least 1, got {rounds}")
    found = {}
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as folder:
        sites = write_hippocampus(Path(folder), data)
        for arm, augment in ARMS.items():
            found[arm] = _trained(Path(folder), sites, augment(), rounds, seed)
            say(f"{arm}: {found[arm]}")
    return {"rounds": rounds, "seed": seed, "arms": found}


def _trained(
    folder: Path, sites: list[str], augment: tuple[Augmentation, ...], rounds: int, seed: int
) -> dict[str, float]:
    task = Segmentation(
        "hippocampus", size=SIZE, spacing=(1.0, 1.0, 1.0), architecture=UNet((16, 32, 64)), augment=augment
    )
    files = {site: load_site_file(folder / f"{site}.yaml", site) for site in sites}
    together = Together(task).hold({site: task.load(file) for site, file in files.items()})
    data, device = together.load(files[sites[0]]), torch.device("cpu")
    seed_torch(seed)
    models = nn.ModuleDict({"local": together.network(data)})
    hospital = Hospital(
        task=together, data=data, models=models, device=device, roster=("all",), name="all", seed=seed
    )  # fmt: skip
    method = Local(batch_size=2, lr=0.002, schedule="polynomial")
    for number in range(1, rounds + 1):
        Site(hospital, method, number, Span(1, rounds)).fit("local")
    scores = {}
    for split in ("train", "test"):
        looked_at = type(data)({**data.splits, "test": data.splits[split]}, data.class_names)
        tested, _ = evaluate_test(method, "local", models, together, looked_at, device)
        scores[split] = round(tested.metrics["dice"], 4)
    return scores


def table_of(results: dict[str, Any]) -> str:
    """Dice of each arm, and the difference to training without augmentation."""
    plain = results["arms"]["none"]
    rows = [
        [arm, *(f"{scores[split]:.3f}" for split in ("train", "test")), f"{scores['test'] - plain['test']:+.3f}"]
        for arm, scores in results["arms"].items()
    ]
    return f"{results['rounds']} passes, seed {results['seed']}; mean of the three sources:\n\n" + markdown(
        ["augmentation", "Dice, training volumes", "Dice, test volumes", "to none"], rows
    )


def command(
    data: Annotated[Path | None, typer.Option(help="The volumes; default: $MEDPFL_HIPPOCAMPUS.")] = None,
    rounds: Annotated[int, typer.Option(help="Passes over the training volumes.")] = 10,
    seed: Annotated[int, typer.Option(help="Of initial weights and batches.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers and the machine's facts.")] = None,
) -> None:
    """A small 3-D network with nnU-Net's augmentation, with and without mirroring, beside training without."""
    facts = machine()
    results = measure(data, rounds, seed)
    write_json(out, "mirroring", facts, results)
    say(table_of(results))
