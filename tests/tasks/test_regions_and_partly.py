# SPDX-License-Identifier: Apache-2.0
"""Segmentation of regions that overlap, and of classes that only some hospitals annotate."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from evaluating import evaluate_at
from medpfl.compare.pooled import Together
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError, DataError, SiteFileError
from medpfl.data.readout import ByRegion
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import load_site_file
from medpfl.deployed.export import export
from medpfl.deployed.labels import dice_of
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.methods.auto import MEMBERS, Auto
from medpfl.methods.averaged import averaged
from medpfl.methods.contract import Build
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.moe import MoE
from medpfl.models.unet import UNet
from medpfl.results.files import read_training
from medpfl.results.tables import result_table
from medpfl.rounds.simulate import simulate
from medpfl.tasks import PartlyLabelled, RegionSegmentation, Segmentation
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import CrossEntropy, DiceCE
from medpfl.tasks.losses.marginal import Marginal
from medpfl.tasks.together import averaged_as
from small_jobs import small_job

REGIONS: dict[str, Any] = {"whole": [1, 2, 3], "core": [2, 3], "enhancing": [3]}
BRATS = {"regions": REGIONS, "written": [1, 2, 3], "architecture": UNet((4, 8)), "size": (16, 16)}


def samples(masks: Tensor, classes: int, annotated: tuple[int, ...] | None = None) -> Samples:
    count = len(masks)
    names = [f"case {n}" for n in range(count)]
    return Samples(torch.zeros(count, 1, *masks.shape[1:]), masks, np.arange(count), names, classes, annotated)


def data(masks: Tensor, names: list[str], annotated: tuple[int, ...] | None = None) -> SiteData:
    mine = samples(masks, len(names), annotated)
    return SiteData({"train": mine, "validation": mine, "test": mine}, names)


def test_regions_are_found_by_themselves_and_written_in_their_order() -> None:
    task = RegionSegmentation("d", **BRATS)
    # Pixels: nothing; whole; whole and core; all three; core alone; enhancing alone, which overwrites.
    outputs = torch.tensor([[-1.0, 1, 1, 1, -1, -1], [-1, -1, 1, 1, 1, -1], [-1, -1, -1, 1, -1, 1]])[None, :, None]
    assert task.decide(outputs)[0, 0].tolist() == [0, 1, 2, 3, 2, 3]
    readout = task.spec.readout
    assert readout.classes(readout.shares(outputs)[0].numpy())[0].tolist() == [0, 1, 2, 3, 2, 3]
    assert isinstance(readout, ByRegion) and task.network(data(torch.zeros(1, 16, 16), list("abcd")))(
        torch.zeros(1, 1, 16, 16)
    ).shape == (1, 3, 16, 16)
    again = build(spec_of(task), Task, "task")
    assert again == task and spec_of(again) == spec_of(task)


def test_the_loss_and_the_dice_of_regions(tmp_path: Path) -> None:
    task = RegionSegmentation("d", **BRATS, more_metrics=("hd95_core",))
    truth = torch.tensor([[[0, 1, 2, 3], [0, 0, 2, 3]]], dtype=torch.uint8)
    found = torch.tensor([[[1, 1, 2, 2], [0, 0, 3, 3]]], dtype=torch.uint8)
    values = task.evaluate(found, samples(truth, 4), task.metrics).metrics
    whole, core, enhancing = 2 * 5 / (5 + 6), 1.0, 2 * 1 / (2 + 2)
    assert values == pytest.approx({
        "dice": (whole + core + enhancing) / 3, "dice_whole": whole, "dice_core": core, "dice_enhancing": enhancing,
    })  # fmt: skip
    for name, labels in (("found", found), ("truth", truth)):
        Image.fromarray(labels[0].numpy()).save(tmp_path / f"{name}.png")
    written = dice_of(tmp_path / "found.png", tmp_path / "truth.png", 4, task.structures(4))
    assert written == pytest.approx((whole + core + enhancing) / 3)
    outputs = torch.randn(1, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    wanted = torch.stack([truth > 0, truth > 1, truth > 2], dim=1).float()
    p = outputs.sigmoid()
    dice = 1 - (2 * (p * wanted).sum((2, 3)) + 1e-5) / ((p + wanted).sum((2, 3)) + 1e-5)
    expected = dice.mean() + nn.functional.binary_cross_entropy(p, wanted)
    assert task.loss(outputs, truth).item() == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(("changes", "words"), [
    ({"regions": {}}, "must name the labels of each region"),
    ({"regions": {"all": [0, 1]}, "written": [1]}, "numbers above 0"),
    ({"regions": {"2": [1]}, "written": [1]}, "a letter first, got '2'"),
    ({"written": [1, 2]}, "written must be a label of each region"),
    ({"written": [1, 1, 3]}, "written must be a label of each region"),
    ({"loss": CrossEntropy()}, "leave 'loss' out"),
    ({"score": "dice_cor"}, "did you mean 'dice_core'"),
])  # fmt: skip
def test_what_a_job_of_regions_may_not_say(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RegionSegmentation("d", **{**BRATS, **changes})
    assert words in str(caught.value)


def test_regions_are_refused_where_one_class_must_hold() -> None:
    task, mine = RegionSegmentation("d", **BRATS), data(torch.zeros(2, 16, 16), list("0abc"))
    with pytest.raises(ConfigError, match="MoE needs classes of which one holds; the regions of RegionSegmen"):
        MoE().models(Build(task, mine, ("anna",), seed=0))
    with pytest.raises(ConfigError, match=r"name the label 3; the labels here are 1 to 2, after the background"):
        task.informed(data(torch.zeros(2, 16, 16), ["background", "a", "b"]))


def test_several_models_of_regions_are_the_mean_of_their_probabilities() -> None:
    """Of each region by itself: as shares of one whole, no region would ever have more than a half of the pixels."""
    task, mine = RegionSegmentation("d", **BRATS), data(torch.zeros(2, 16, 16), list("0abc"))
    build = Build(task, mine, ("anna",), seed=0)
    auto, inputs = Auto(), torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    networks = nn.ModuleDict(auto.models(build)).eval()
    for number, name in enumerate(MEMBERS):
        for weight in networks[name].parameters():
            weight.data += 0.1 * number
    expected = torch.stack([networks[name](inputs).sigmoid() for name in MEMBERS]).mean(dim=0)
    torch.testing.assert_close(auto.predict("personal", networks, inputs).sigmoid(), expected)
    members = {
        name: (FedAvg(), "fedavg", nn.ModuleDict({"fedavg": networks[name]})) for name in MEMBERS
    }  # as a hospital averages what a job left there
    method, name, both = averaged(members, averaged_as(task.spec))
    torch.testing.assert_close(method.predict(name, both, inputs).sigmoid(), expected)
    assert averaged_as(Segmentation("d", size=(16, 16)).spec) == "mask"


def test_the_marginal_loss_takes_what_is_not_annotated_for_background_or_itself() -> None:
    outputs = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    truth = torch.tensor([0, 2, 0, 0, 2, 0, 0, 0, 2]).view(1, 3, 3).repeat(2, 1, 1)
    loss = Marginal(CrossEntropy(), (2,)).of(outputs, truth)
    p = outputs.softmax(dim=1)
    probability = torch.where(truth == 2, p[:, 2], p[:, 0] + p[:, 1] + p[:, 3])
    assert loss.item() == pytest.approx(-probability.log().mean().item(), abs=1e-6)
    # What the network says of the other classes and the background among themselves is left to the other hospitals.
    moved = outputs.detach().clone()
    moved[:, [0, 1, 3]] = torch.logsumexp(moved[:, [0, 1, 3]], dim=1, keepdim=True) - math.log(3)
    assert Marginal(DiceCE(), (2,)).of(moved, truth).item() == pytest.approx(
        Marginal(DiceCE(), (2,)).of(outputs, truth).item(), abs=1e-6
    )
    every = Marginal(DiceCE(), (1, 2, 3)).of(outputs, truth)
    assert every.item() == pytest.approx(DiceCE().of(outputs, truth).item(), abs=1e-6)


def test_metrics_count_the_annotated_classes_alone() -> None:
    truth = torch.tensor([[[0, 1, 1, 0]]], dtype=torch.uint8)
    found = torch.tensor([[[2, 1, 0, 2]]], dtype=torch.uint8)
    task = PartlyLabelled("d", architecture=UNet((4, 8)), size=(16, 16), more_metrics=("dice_1", "dice_2"))
    partly = task.evaluate(found, samples(truth, 3, (1,))).metrics
    assert partly["dice"] == partly["dice_1"] == pytest.approx(2 / 3) and math.isnan(partly["dice_2"])
    whole = task.evaluate(found, samples(truth, 3)).metrics
    assert whole["dice"] == pytest.approx(1 / 3) and whole["dice_2"] == 0
    mine = task.informed(data(truth.repeat(2, 1, 1), ["background", "a", "b"], (1,)))
    assert isinstance(mine, PartlyLabelled) and mine.loss == Marginal(DiceCE(), (1,)) and task.loss == DiceCE()
    assert task.informed(data(truth, ["background", "a", "b"])).loss == DiceCE()  # type: ignore[comparison-overlap]
    with pytest.raises(ConfigError, match="weights are of all classes, some of which are not annotated here"):
        PartlyLabelled("d", architecture=UNet((4, 8)), size=(16, 16), loss=CrossEntropy(weights=(1, 1, 1))).informed(
            data(truth, ["background", "a", "b"], (1,))
        )


def declare(folder: Path, site: str, annotated: list[str] | None, seed: int) -> Path:
    """Images of a bright and a dark square, of whose label maps one shows both, another the bright ones only."""
    rng, place = np.random.default_rng(seed), folder / site
    (place / "images").mkdir(parents=True)
    (place / "masks").mkdir()
    for number in range(20):
        image, mask = np.full((16, 16), 120, np.uint8), np.zeros((16, 16), np.uint8)
        for label, value in ((1, 250), (2, 10)):
            top, left = rng.integers(0, 11), rng.integers(0, 3) + 8 * (label - 1)
            image[top : top + 5, left : left + 5] = value
            if annotated is None or f"square {label}" in annotated:
                mask[top : top + 5, left : left + 5] = label
        image = (image + rng.integers(0, 5, image.shape)).astype(np.uint8)
        Image.fromarray(image).save(place / "images" / f"{number}.png")
        Image.fromarray(mask).save(place / "masks" / f"{number}.png")
    masks = {"files": "masks/*.png", "labels": {0: "background", 1: "square 1", 2: "square 2"}}
    masks |= {"annotated": annotated} if annotated else {}
    squares = {"kind": "images", "files": "images/*.png", "channels": 1, "masks": masks}
    (place / "site.yaml").write_text(yaml.safe_dump({"site": site, "datasets": {"squares": squares}}))
    return place / "site.yaml"


def test_who_annotates_what_is_declared(tmp_path: Path) -> None:
    path = declare(tmp_path, "anna", ["square 1"], 0)
    site = load_site_file(path)
    task = PartlyLabelled("squares", architecture=UNet((4, 8)), size=(16, 16))
    assert task.load(site).splits["train"].annotated == (1,)
    with pytest.raises(DataError, match=r"show square 1 only, and the job's task .* PartlyLabelled does not"):
        Segmentation("squares", architecture=UNet((4, 8)), size=(16, 16)).load(site)
    with pytest.raises(ConfigError, match="Pooled: some hospitals annotate only some of the classes"):
        Together(task).hold({"anna": task.load(site)})
    text = path.read_text()
    path.write_text(text.replace("- square 1\n", "- square\n"))
    with pytest.raises(SiteFileError, match="'annotated' names labels but the first, each once: square 1, square 2"):
        load_site_file(path)
    path.write_text(text.replace("- square 1\n", "- square 2\n"))
    with pytest.raises(DataError, match=r"label value 1 \(square 1\) is there, and 'annotated' does not name it"):
        task.load(load_site_file(path))


@pytest.mark.slow
def test_a_class_is_learnt_from_the_hospitals_that_annotate_it(tmp_path: Path) -> None:
    """The common model finds the class at the hospital that has no outline of it, and tables say whose mean it is."""
    sites = {
        "anna": declare(tmp_path, "anna", ["square 1"], 0),
        "berta": declare(tmp_path, "berta", None, 1),
        "clara": declare(tmp_path, "clara", ["square 2"], 2),
    }
    task = PartlyLabelled("squares", architecture=UNet((8, 16)), size=(16, 16), more_metrics=("dice_1", "dice_2"))
    simulate(small_job(8, task=task), sites, tmp_path / "results", tmp_path / "home")
    summary = read_training(tmp_path / "results")
    table = result_table(summary, score="dice_2")
    column = table.models.index("fedavg")
    assert math.isnan(table.values[0, column]) and table.values[1, column] > 0.5
    assert table.mean_texts[column].endswith("(2 of 3 hospitals)")
    assert "(2 of 3 hospitals)" in (tmp_path / "results" / "report.html").read_text()


@pytest.mark.slow
def test_regions_from_training_to_files(tmp_path: Path) -> None:
    sites = {site: declare(tmp_path, site, None, seed) for seed, site in enumerate(("anna", "berta"))}
    regions = {"both": (1, 2), "two": (2,)}
    task = RegionSegmentation(
        "squares", architecture=UNet((4, 8)), size=(16, 16), regions=regions, written=(1, 2), score="dice_two"
    )
    simulate(small_job(2, task=task), sites, tmp_path / "results", tmp_path / "home")
    path = next((tmp_path / "home").glob("anna/*/models/personal-best.safetensors"))
    model = load_deployed(path)
    assert evaluate_at(model, load_site_file(sites["berta"]), "test").metrics.keys() == {
        "dice",
        "dice_both",
        "dice_two",
    }
    source = tmp_path / "anna" / "images" / "3.png"
    labels = tmp_path / "labels"
    labels.mkdir()
    truth = np.ones(np.asarray(Image.open(source)).shape[:2], np.uint8)
    truth[: len(truth) // 2] = 2
    Image.fromarray(truth).save(labels / "3.png")
    done = predict(model, source, tmp_path / "out", probabilities=True, labels=labels)
    written = np.asarray(Image.open(tmp_path / "out" / "3.png"))
    pairs = ((written > 0, truth > 0), (written == 2, truth == 2))
    each = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in pairs]
    assert done.rows[0]["dice"] == pytest.approx(np.mean(each), abs=1e-6)
    both, two = np.load(tmp_path / "out" / "3_probabilities.npy")
    assert np.array_equal(written, np.where(two > 0.5, 2, np.where(both > 0.5, 1, 0)))
    export(path, tmp_path / "ts", "torchscript")
    more = {"medpfl.json": ""}
    torch.jit.load(str(tmp_path / "ts" / "model.ts"), _extra_files=more)
    assert "both (written as 1), two (written as 2)" in json.loads(more["medpfl.json"])["output"]["probabilities"]
