# SPDX-License-Identifier: Apache-2.0
"""``benchmarks moments``: what becomes of Adam's moments where a round replaces the weights.

Three arms, on the same splits, initial weights and batches: the moments are kept at the hospital, forgotten before
every round, or sent and mixed by the same matrix as the weights (which is no option of a job, for three times as much
would leave a hospital). What is finished is in the file and is not repeated.
"""

import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import typer
from torch import nn

from benchmarks.common import OutOption, SeedsOption, machine, markdown, write_json
from medpfl.cli.terminal import say
from medpfl.compare.statistics import paired_gain
from medpfl.core.errors import MedPFLError
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer, SoftPull
from medpfl.demo.known import DEMOS
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.fedsm.selecting import Moments
from medpfl.models.lenet import LeNet5
from medpfl.models.unet import UNet
from medpfl.results.files import read_training
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Classification, Segmentation, Tabular
from medpfl.tasks.contract import Task

Results = dict[str, dict[str, float]]
"""Study, model, arm and seed to the means over the hospitals: "best" and "last" test score."""


@dataclass(frozen=True, kw_only=True)
class TravellingMoments(Method):
    """Slot "model": the network and its optimiser's moments. With the mean it is FedAvg, with ``SoftPull`` SoftPull."""

    deploys: ClassVar = {"personal": "model"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        network = build.network()
        return {"model": network, "moments": Moments(network)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": [*under(models, "model"), *under(models, "moments")]}

    def local_round(self, site: Site) -> None:
        network, moments, optimizer = site.models["model"], site.models["moments"], site._optimizer("model")
        kept = {"step": "step", "exp_avg": "mean", "exp_avg_sq": "square"}  # torch's names to ours

        def buffer(ours: str, key: str) -> Any:
            return moments.get_buffer(ours if ours == "step" else Moments._name(ours, key))

        if moments.get_buffer("step") > 0:
            for key, weight in network.named_parameters():
                optimizer.state[weight] = {name: buffer(ours, key).clone() for name, ours in kept.items()}
        site.fit("model")
        for key, weight in network.named_parameters():
            for name, ours in kept.items():
                buffer(ours, key).copy_(optimizer.state[weight][name])


@dataclass(frozen=True)
class Study:
    """Task and training as in docs/results/compare-<name>.yaml."""

    demo: str
    task: Task
    rounds: int
    training: dict[str, Any]


def _patterns(kind: str) -> Study:
    task = Classification("pattern", size=(16, 16), architecture=LeNet5(), score="accuracy")
    return Study(f"patterns_{kind}", task, 20, {"steps": 20, "batch_size": 16, "lr": 0.001})


STUDIES: dict[str, Study] = {
    "heart": Study("heart", Tabular("heart"), 15, {"steps": 100, "batch_size": 4, "lr": 0.001}),
    "label-skew": _patterns("label_skew"),
    "feature-shift": _patterns("feature_shift"),
    "phantom": Study(
        "phantom",
        Segmentation(
            "organ", size=(48, 48), spacing=(4.0, 4.0, 8.0), architecture=UNet((16, 32, 64), residual_units=1)
        ),
        12,
        {"steps": 15, "batch_size": 16, "lr": 0.002},
    ),
}
ARMS = ("kept", "reset", "mixed")
MODELS = {"local": "Local", "fedavg": "FedAvg", "personal": "SoftPull"}
PULL = 0.5


def measure(studies: list[str], seeds: int, done: Results, keep: Callable[[Results], None]) -> Results:
    """Train what ``done`` lacks; ``keep`` is told after every run.

    Raises:
        MedPFLError: there is no such study.
    """
    for name in studies:
        if name not in STUDIES:
            raise MedPFLError(f"there is no study '{name}'; there are: {', '.join(STUDIES)}")
        with tempfile.TemporaryDirectory(prefix="medpfl-") as scratch:
            sites = Path(scratch) / "sites"
            DEMOS[STUDIES[name].demo](sites)
            files = {path.stem: path for path in sorted(sites.glob("*.yaml"))}
            for arms, seed in itertools.product((ARMS[:2], ARMS[2:]), range(seeds)):
                for arm in arms:
                    if f"{name} SoftPull {arm} {seed}" not in done:
                        done.update(_trained(name, arm, seed, files, Path(scratch) / f"{arm}-{seed}"))
                        keep(done)
    return done


def _trained(name: str, arm: str, seed: int, files: dict[str, Path], folder: Path) -> Results:
    study = STUDIES[name]

    def means(method: Method, slots: dict[str, Mixer], references: tuple[str, ...]) -> dict[str, dict[str, float]]:
        settings = Settings(rounds=study.rounds, references=references, finetune=0, seed=seed)
        place = folder / "-".join(type(mixer).__name__ for mixer in slots.values())
        simulate(Job("moments", 2, settings, slots, method, study.task), files, place / "results", place / "home")
        found: dict[str, dict[str, list[float]]] = {}
        for line in read_training(place / "results").test:
            score = line.metrics[study.task.score]
            found.setdefault(line.model, {}).setdefault(line.choice, []).append(
                float("nan") if score is None else score
            )
        return {model: {choice: float(np.mean(all_)) for choice, all_ in each.items()} for model, each in found.items()}

    pull: dict[str, Mixer] = {"model": SoftPull(lam=PULL)}
    mean: dict[str, Mixer] = {"model": Mean()}
    if arm == "mixed":
        method = TravellingMoments(**study.training)
        pulled, averaged = (means(method, slots, ())["personal"] for slots in (pull, mean))
        return {f"{name} SoftPull mixed {seed}": pulled, f"{name} FedAvg mixed {seed}": averaged}
    kept = softpull.SoftPull(**study.training)
    chosen = kept if arm == "kept" else replace(kept, optimizer_state="reset")
    scores = means(chosen, pull, ("local", "fedavg"))
    return {f"{name} {MODELS[model]} {arm} {seed}": found for model, found in scores.items()}


def table_of(results: dict[str, Any]) -> str:
    """Test scores of the best round, and how the last round's differ from those with kept moments, paired by seed."""
    found: Results = results["scores"]
    rows = []
    for name in STUDIES:
        for model in MODELS.values():
            for arm in ARMS:
                lines = {s: found[key] for s in range(1000) if (key := f"{name} {model} {arm} {s}") in found}
                if not lines:
                    continue
                kept = {s: found[f"{name} {model} kept {s}"] for s in lines}
                cells = [name, model, arm, str(len(lines))]
                for choice in ("best", "last"):
                    scores = [line[choice] for line in lines.values()]
                    gain = paired_gain(scores, [kept[s][choice] for s in lines])
                    told = f"{gain.mean:+.3f} ({gain.wins} better, {gain.losses} worse)"
                    cells += [f"{np.mean(scores):.3f} ± {np.std(scores, ddof=1):.3f}", "" if arm == "kept" else told]
                rows.append(cells)
    heads = ["hospitals", "model", "moments", "seeds", "best round", "to kept", "last round", "to kept"]
    return markdown(heads, rows)


def finished(out: Path | None) -> Results:
    """What an earlier, perhaps interrupted run left in the file."""
    if out is None or not out.is_file():
        return {}
    scores: Results = json.loads(out.read_text(encoding="utf-8"))["scores"]
    return scores


def command(
    studies: Annotated[str, typer.Option(help="Names, separated by commas; see benchmarks/moments.py.")] = (
        "heart,label-skew,feature-shift,phantom"
    ),
    seeds: SeedsOption = 5,
    out: OutOption = None,
) -> None:
    """Adam's moments where a round replaces the weights: kept, forgotten, or mixed as the weights are."""
    facts = machine()

    def keep(scores: Results) -> None:
        write_json(out, "moments", facts, {"scores": scores})

    scores = measure(studies.split(","), seeds, finished(out), keep)
    say(table_of({"scores": scores}))
