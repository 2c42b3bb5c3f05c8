# SPDX-License-Identifier: Apache-2.0
"""The public data that the jobs are for: HAM10000's images, masks and table, and MedMNIST's BreastMNIST."""

import csv
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from medpfl.data.arrays.declare import Arrays
from medpfl.data.declared import Problems
from medpfl.data.images.declare import Images
from medpfl.data.site_file import load_site_file
from medpfl.models.lenet import LeNet5
from medpfl.models.unet import UNet
from medpfl.tasks import Classification, Segmentation

SOURCES = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
EACH = 15


def shared(variable: str, name: str) -> Path:
    """A downloaded file; the test is skipped where it is not."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data" / name
    for place in (os.environ.get(variable), beside):
        if place and Path(place).is_file():
            return Path(place)
    pytest.skip(f"{name} is not here; set {variable} to the file")


@pytest.fixture(scope="module")
def skin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A few images and masks of each source; the table's rows of other images of the sources are left out."""
    archive = shared("MEDPFL_HAM10000", "ham10000_200x150.zip")
    folder = tmp_path_factory.mktemp("ham10000")
    with zipfile.ZipFile(archive) as file:
        header, *lines = file.read("metadata.csv").decode().splitlines()
        kept, count = [header], dict.fromkeys(SOURCES, 0)
        for line in lines:
            row = dict(zip(header.split(","), next(csv.reader([line])), strict=False))
            source = row.get("dataset", "")
            if source in SOURCES and count[source] < EACH:
                count[source] += 1
                stem = row["image_id"].removesuffix(".jpg")
                file.extract(f"images/{stem}.jpg", folder)
                file.extract(f"masks/{stem}_segmentation.png", folder)
                kept.append(line)
            elif source not in SOURCES:
                kept.append(line)  # thousands of rows without a source, with one cell less than the header
    assert len(kept) > 8000 and set(count.values()) == {EACH}
    (folder / "metadata.csv").write_text("\n".join(kept))
    yield folder


def declare(folder: Path, sources: list[str]) -> Images:
    dataset: dict[str, Any] = {
        "kind": "images",
        "files": "images/*.jpg",
        "table": {"file": "metadata.csv", "image": "image_id", "where": {"dataset": sources}},
        "label": {
            "column": "dx",
            "classes": {"benign": ["nv", "bkl", "df", "vasc"], "malignant": ["akiec", "bcc", "mel"]},
        },
        "masks": {
            "files": "masks/*.png",
            "suffix": "_segmentation",
            "labels": {0: "background", 1: "lesion"},
            "label_map": {255: 1},
        },
        "split": {"group": "lesion_id", "seed": 0},
    }
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"skin": dataset}}))
    return load_site_file(folder / "site.yaml").dataset("skin", Images)


@pytest.mark.slow
def test_the_four_sources_are_four_hospitals(skin: Path) -> None:
    rows = {row["image_id"]: row for row in csv.DictReader(io.StringIO((skin / "metadata.csv").read_text()))}
    seen: set[str] = set()
    for source in SOURCES:
        listing = declare(skin, [source]).cases(Problems())
        cases = [case for part in listing.values() for case in part]
        assert len(cases) == EACH and all(listing.values())
        for case in cases:
            row = rows[case.path.name]
            assert row["dataset"] == source and case.group == row["lesion_id"]
            assert case.label == (row["dx"] in ("akiec", "bcc", "mel"))
        lesions = [{case.group for case in part} for part in listing.values()]
        assert sum(map(len, lesions)) == len(set().union(*lesions))  # no lesion is in two splits
        seen |= {case.name for case in cases}
    assert len(seen) == 4 * EACH


@pytest.mark.slow
def test_images_and_masks_become_samples(skin: Path) -> None:
    declare(skin, list(SOURCES))
    site_file = load_site_file(skin / "site.yaml")
    classes = Classification("skin", size=(48, 64)).load(site_file)
    masks = Segmentation("skin", size=(48, 64), architecture=UNet((8, 16))).load(site_file)
    assert sum(map(len, classes.splits.values())) == 4 * EACH
    for split, samples in classes.splits.items():
        assert samples.inputs.shape[1:] == (3, 48, 64) and samples.inputs.abs().max() <= 2
        assert torch.equal(samples.inputs[:], masks.splits[split].inputs[:])
        shares = masks.splits[split].targets[:].float().mean(dim=(1, 2))
        for name, share in zip(samples.names, shares.tolist(), strict=True):
            with Image.open(skin / "masks" / f"{Path(name).stem}_segmentation.png") as mask:
                assert share == pytest.approx((np.asarray(mask) > 0).mean(), abs=0.02)


def test_breastmnist_as_it_is(tmp_path: Path) -> None:
    file = shared("MEDPFL_BREASTMNIST", "medmnist/breastmnist.npz")
    dataset = {"kind": "arrays", "file": str(file), "classes": {"malignant": [0], "benign": [1]}}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"breast": dataset}}, sort_keys=False))
    data = Classification("breast", size=(28, 28), architecture=LeNet5()).load(load_site_file(tmp_path / "site.yaml"))
    assert {split: len(samples) for split, samples in data.splits.items()} == {
        "train": 546,
        "validation": 78,
        "test": 156,
    }
    with np.load(file, allow_pickle=False) as content:
        assert data.splits["test"].targets.tolist() == content["test_labels"].tolist()
        restored = data.splits["validation"].inputs[:, 0].numpy() * 63.75 + 127.5
        np.testing.assert_allclose(restored, content["val_images"], atol=1e-3)


@pytest.mark.slow
def test_fedaps_split_of_twenty_hospitals(tmp_path: Path) -> None:
    """The lists of FedAP's Table 4 on arrays of the size they were made for (MedMNIST 1): to each hospital its rows."""
    lists = shared("MEDPFL_FEDAP_LISTS", "fedap_splits/organc_alpha0.05.json")
    counts = {"train": 13000, "val": 2392, "test": 8268}
    rng = np.random.default_rng(0)
    content = {}
    for part, count in counts.items():
        content[f"{part}_images"] = np.zeros((count, 2, 2), np.uint8)
        content[f"{part}_labels"] = rng.integers(0, 11, (count, 1))
    np.savez(tmp_path / "organcmnist.npz", **content)
    expected = json.loads(lists.read_text())
    names = [f"{part}_images[{row}]" for part, count in counts.items() for row in range(count)]
    seen: set[str] = set()
    for hospital in (0, 7, 19):
        rule = {"lists": {"file": str(lists), "train": 2 * hospital, "test": 2 * hospital + 1}}
        dataset = {
            "kind": "arrays",
            "file": "organcmnist.npz",
            "classes": {f"organ {number}": [number] for number in range(11)},
            "split": rule,
        }
        (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"organ": dataset}}))
        listing = load_site_file(tmp_path / "site.yaml").dataset("organ", Arrays).cases(Problems())
        for split, number in (("train", 2 * hospital), ("test", 2 * hospital + 1)):
            found = {case.name for case in listing[split]}
            assert found == {names[row] for row in expected[number]} and not found & seen
            seen |= found
