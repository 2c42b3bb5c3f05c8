# SPDX-License-Identifier: Apache-2.0
"""Images with masks beside them or in folders: what 'medpfl site init' proposes loads, each mask with its image."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from medpfl.check.reading import inspect
from medpfl.data.declared import Problems
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file

SPLITS = ("train", "val", "test")


@pytest.mark.parametrize(
    ("image", "mask", "split"),
    [
        ("scan{word}.png", "scan{word}_mask.png", None),
        ("all/{word}.png", "all/{word}_seg.png", None),
        ("p{patient}/{number}.png", "p{patient}/{number}_mask.png", "folder"),
        ("p{patient}/images/{visit}.png", "p{patient}/masks/{visit}.png", "folder"),
        ("images/p{patient}/{visit}.png", "masks/p{patient}/{visit}.png", "folder"),
        ("{split}/images/{visit}.png", "{split}/masks/{visit}.png", "split"),
        ("images/{split}/{visit}.png", "masks/{split}/{visit}.png", "split"),
    ],
)
def test_masks_are_found(image: str, mask: str, split: str | None, tmp_path: Path) -> None:
    for number in range(12):
        one = {"number": number, "word": "abcdefghijkl"[number], "patient": number // 3, "visit": number % 4}
        one["split"] = SPLITS[number // 4]
        if split == "folder":
            one["visit"] = number % 3
        for name, value in ((image, 100 + number), (mask, number)):
            file = tmp_path / "data" / name.format(**one)
            file.parent.mkdir(parents=True, exist_ok=True)
            values = np.full((8, 8), value, np.uint8)
            values[0] = 0
            Image.fromarray(values).save(file)
    write_site_file(tmp_path / "data", tmp_path / "site.yaml", Answers({"site": "here", "dataset": "d"}))
    found = yaml.safe_load((tmp_path / "site.yaml").read_text())["datasets"]["d"]["split"]
    assert (found.get("group"), found.get("column")) == (
        split if split == "folder" else None, split if split == "split" else None
    )  # fmt: skip
    dataset = load_site_file(tmp_path / "site.yaml", "here").datasets["d"]
    assert not inspect("d", dataset).problems
    listing = dataset.cases(Problems())
    assert sum(map(len, listing.values())) == 12
    for place, cases in listing.items():
        for case in cases:
            item = dataset.read(case)
            assert item.image.max() - 100 == item.target.max()  # type: ignore[union-attr]
            if split == "split":
                assert SPLITS.index({"validation": "val"}.get(place, place)) == (item.image.max() - 100) // 4


@pytest.mark.parametrize("values", [[0, 1], [0, 255], [0, 256], [0, 65535], [0, 256, 512], [0, 300, 65535]])
@pytest.mark.parametrize("names", [("images/{}.png", "masks/{}.tif"), ("{}_photo.png", "{}_drawn.png")])
def test_masks_of_16_bits(names: tuple[str, str], values: list[int], tmp_path: Path) -> None:
    """What is above 255 passed for 255: no mask of the site file's could be read, or two structures were one."""
    for number in range(12):
        drawn = np.zeros((8, 8), np.uint16)
        for place, value in enumerate(values):
            drawn[place] = value
        shown = np.random.default_rng(number).integers(0, 65536, (8, 8)).astype(np.uint16)
        for name, pixels in zip(names, (shown, drawn), strict=True):
            file = tmp_path / "data" / name.format(number)
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    write_site_file(tmp_path / "data", tmp_path / "site.yaml", Answers({"site": "here", "dataset": "d"}))
    dataset = load_site_file(tmp_path / "site.yaml", "here").datasets["d"]
    assert not inspect("d", dataset).problems
    item = dataset.read(dataset.cases(Problems())["train"][0])
    assert isinstance(item.target, np.ndarray) and item.target[: len(values), 0].tolist() == [*range(len(values))]
