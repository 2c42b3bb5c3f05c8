# SPDX-License-Identifier: Apache-2.0
"""Example segmentations: a few test cases of each hospital with what Local, FedAvg and the best other method found.

They are images of patients, so a comparison makes them on request only, and they go into its page and nowhere else.
Which cases are shown is a rule: a hospital's first test case, and that of Local's median score.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.check.pictures import Outline, Picture, draw, radiological
from medpfl.compare.arranging import ranked
from medpfl.compare.collect import in_order
from medpfl.compare.data import reader
from medpfl.compare.file import FEDAVG, FINE_TUNED, LOCAL, REFERENCES
from medpfl.compare.plan import Plan
from medpfl.compare.results import Results
from medpfl.compare.run_results import TrainedRun
from medpfl.compare.runner import finished, read_run
from medpfl.compare.runs import Run
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples, SiteData
from medpfl.deployed.model_file import Deployed, load_deployed
from medpfl.deployed.predict import evaluate_on

TRUTH, FOUND = "#ffd23f", "#3fa7ff"


@dataclass(frozen=True)
class _Shown:
    """A model at its hospital. ``scores``: of each test case, in the order of the samples' names."""

    name: str
    model: Deployed
    scores: list[float]


@dataclass(frozen=True)
class Segmented:
    """What a model found in a case. ``png``: the picture in base64."""

    name: str
    score: float
    png: str


@dataclass(frozen=True)
class Example:
    """A case with what the models found in it. ``what``: which case it is; ``run``: whose models."""

    site: str
    what: str
    run: str
    models: list[Segmented]


def examples_of(plan: Plan, content: Results, results: Path) -> list[Example]:
    """The cases with their pictures, of the first split and seed that has them all."""
    wanted = _wanted(content)
    for split, seed in ((split.seed, seed) for split in plan.splits for seed in plan.file.seeds):
        labels = _labels(plan, results, split, seed)
        if LOCAL in labels and all(name in labels for name in wanted):
            break
    else:
        return []
    run = f"Seed {seed}" + (f", split {split}" if split is not None else "")
    found = []
    for site in plan.hospitals:
        declared = reader(split)(plan.site_files[site], site)
        data = plan.task.load(declared)
        shown = [_model(name, *labels[name], site, data, results) for name in wanted]
        volumes = declared.datasets[plan.task.dataset].form == "volumes"
        for what, place in _cases(shown[0].scores, content.score):
            models = [Segmented(each.name, each.scores[place], _picture(each, data, place, volumes)) for each in shown]
            found.append(Example(site, what, run, models))
    return found


def _wanted(content: Results) -> list[str]:
    """Local, FedAvg, and the best of the file's methods on the leaderboard."""
    names = [row.name for row in ranked(content) if row.curve]  # a super model is made of networks of others
    best = next((name for name in names if name not in REFERENCES), FINE_TUNED)
    return in_order(name for name in (LOCAL, FEDAVG, best) if name in names)


def _labels(plan: Plan, results: Path, split: int | None, seed: int) -> dict[str, tuple[Run, str]]:
    """Label of each row that this split and seed has to its run and the model's name in it."""
    found = {}
    for run in plan.runs:
        if (run.split, run.seed, run.without) == (split, seed, None) and finished(results, run):
            each = read_run(results, run, TrainedRun)
            for label, row in each.rows.items():
                found[label.replace(each.method, run.name, 1)] = (run, row.model)
    return found


def _model(name: str, run: Run, model: str, site: str, data: SiteData, results: Path) -> _Shown:
    folder = results / "runs" / run.digest / "home" / site / "compared" / "models"
    deployed = load_deployed(folder / f"{model}-best.safetensors")
    cases = evaluate_on(deployed, data, "test").cases
    return _Shown(name, deployed, [float(case[deployed.task.score]) for case in cases])


def _cases(scores: list[float], score: str) -> Iterator[tuple[str, int]]:
    """What is shown of a hospital, by Local's scores: its title and the case's index."""
    yield "the first test case", 0
    middle = sorted(range(len(scores)), key=lambda place: (scores[place], place))[(len(scores) - 1) // 2]
    if middle:
        yield f"the test case with Local's median {score}", middle


def _picture(shown: _Shown, data: SiteData, place: int, volumes: bool) -> str:
    image, truth, found = _slice(shown.model, data.splits["test"], place)
    if len(image) == 3:  # colours, prepared for the network
        image = (image - image.min()) / max(float(np.ptp(image)), 1e-9)
    size = (1.0, 1.0)
    if volumes:
        spacing = getattr(shown.model.task, "spacing", (1.0, 1.0, 1.0))
        size = (spacing[1], spacing[0])
        image, truth, found = (radiological(values) for values in (image, truth, found))
    outlines = [Outline(truth, (TRUTH,), 4), Outline(found, (FOUND,), 2)]
    return Picture(draw(image, outlines, size)).png()


def _slice(
    model: Deployed, samples: Samples, place: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.uint8]]:
    """Of a case the image or axial slice with most of the outlined voxels, CHW, and its true and found mask, HW."""
    inputs, targets = samples.inputs, samples.targets
    if isinstance(inputs, CaseRows) and isinstance(targets, CaseRows):
        rows = np.flatnonzero(samples.case == place).tolist()  # several of one volume's slices
        row = max(rows, key=lambda row: int((targets.whole(row) > 0).sum()))
        whole, mask = inputs.whole(row)[None], targets.whole(row)
        found = _decided(model, whole)
        if mask.ndim == 2:
            return whole[0].numpy(), mask.numpy(), found.numpy()
        index = int((mask > 0).sum(dim=(0, 1)).argmax())
        return whole[0, ..., index].numpy(), mask[..., index].numpy(), found[..., index].numpy()
    mine: NDArray[np.int64] = np.flatnonzero(samples.case == place)
    areas = [int((targets[index : index + 1] > 0).sum()) for index in mine.tolist()]
    index = int(mine[int(np.argmax(areas))])
    image = inputs[index : index + 1]
    found = _decided(model, image)
    truth = targets[index : index + 1][0]
    return image[0].numpy(), truth.numpy().astype(np.uint8), found.numpy().astype(np.uint8)


def _decided(model: Deployed, inputs: Tensor) -> Tensor:
    """What the model decides of a single sample, 1 x ..."""
    with torch.inference_mode():
        return model.task.decide(model.task.infer(model, inputs))[0]
