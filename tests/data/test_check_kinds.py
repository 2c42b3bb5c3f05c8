# SPDX-License-Identifier: Apache-2.0
"""Images, arrays and time series through ``site init`` and ``check-data``: sound ones pass, broken ones are told of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from checked import assert_told, check
from hospitals import change_yaml, write_site
from medpfl.check.reading import inspect
from medpfl.data.init.answers import Answers, parse_classes
from medpfl.data.init.write import write_site_file
from medpfl.data.kinds import KINDS
from medpfl.data.site_file import load_site_file

Break = Callable[[Path], object]


def needs(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(kind not in KINDS, reason=f"the kind '{kind}' is not there yet")


def picture(number: int, side: int = 12) -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 255, (side, side + 4, 3)).astype(np.uint8))


def write_images(folder: Path) -> Path:
    """Twelve images with masks and a table that names them."""
    lines = ["name,patient_id,dx"]
    for number in range(12):
        for part in ("images", "masks"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / "images" / f"i{number:02d}.png")
        mask = np.zeros((12, 16), np.uint8)
        mask[2:6, 3 : 5 + number % 4] = 255
        Image.fromarray(mask).save(folder / "masks" / f"i{number:02d}_mask.png")
        lines.append(f"i{number:02d}.png,p{number // 2},{('nv', 'mel')[number % 2]}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    masks = {"files": "masks/*.png", "suffix": "_mask", "labels": {0: "skin", 1: "lesion"}, "label_map": {255: 1}}
    skin = {
        "kind": "images",
        "files": "images/*.png",
        "table": {"file": "list.csv", "image": "name"},
        "label": {"column": "dx", "classes": {"nevus": ["nv"], "melanoma": ["mel"]}},
        "masks": masks,
        "split": {"group": "patient_id"},
    }
    return write_site(folder, {"skin": skin})


def write_arrays(folder: Path, **changes: Any) -> Path:
    """An .npz file in MedMNIST's format."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 20), ("val", 6), ("test", 8)):
        arrays[f"{split}_images"] = rng.integers(0, 255, (count, 9, 9)).astype(np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % 2)[:, None].astype(np.uint8)
    for key, change in changes.items():
        arrays[key] = change(arrays[key])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "a.npz", **{key: values for key, values in arrays.items() if values is not None})
    declared = {"kind": "arrays", "file": "a.npz", "classes": {"well": [0], "ill": [1]}}
    return write_site(folder, {"breast": declared})


def write_series(folder: Path) -> Path:
    """Six recordings of two channels, resting and walking in turn."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        active = np.arange(120) // 40 % 2
        values = np.sin(np.arange(120) / (3 + 3 * active)) + 0.1 * rng.normal(size=120)
        rows = [f"{v:.4f},{n:.4f},{a}" for v, n, a in zip(values, rng.normal(size=120), active, strict=True)]
        (folder / f"r{number}.csv").write_text("\n".join(["x,y,activity", *rows]) + "\n")
    moves = {
        "kind": "series",
        "files": [f"r{number}.csv" for number in range(6)],
        "channels": ["x", "y"],
        "label": {"column": "activity", "classes": {"rest": [0], "walk": [1]}},
        "window": {"length": 20},
    }
    return write_site(folder, {"moves": moves})


def declare(name: str, **values: Any) -> Break:
    return lambda folder: change_yaml(folder / "site.yaml", lambda site: site["datasets"][name].update(values))


def line(file: str, old: str, new: str) -> Break:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return change


def first_cell(folder: Path) -> None:
    lines = (folder / "r2.csv").read_text().splitlines()
    lines[9] = "oops," + lines[9].split(",", 1)[1]
    (folder / "r2.csv").write_text("\n".join(lines) + "\n")


IMAGES: list[tuple[str, Break, list[str]]] = [
    ("image no image", lambda f: (f / "images/i03.png").write_bytes(b"x"), ["i03.png"]),
    ("image missing", lambda f: (f / "images/i03.png").unlink(), ["list.csv:5", "'i03.png'", "does not exist"]),
    ("mask missing", lambda f: (f / "masks/i03_mask.png").unlink(), ["i03.png", "no mask", "i03_mask"]),
    ("mask's size", lambda f: Image.new("L", (5, 5)).save(f / "masks/i03_mask.png"), ["i03_mask.png", "5 x 5"]),
    (
        "mask's value",
        lambda f: Image.new("L", (16, 12), 7).save(f / "masks/i03_mask.png"),
        ["i03_mask.png", "label value 7 is not declared"],
    ),
    ("class", line("list.csv", "nv", "bkl"), ["list.csv:2", "column 'dx'", "'bkl'", "(nv, mel)"]),
    ("row twice", line("list.csv", "i01.png", "i00.png"), ["list.csv:3", "i00.png", "another row"]),
    ("no column", declare("skin", split={"group": "ward"}), ["list.csv", "column 'ward' is missing"]),
    (
        "image in two splits",
        lambda f: [picture(99).save(f / f"images/i{number:02d}.png") for number in range(12)],
        ["the same image as", "train split"],
    ),
]
ARRAYS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("key missing", {"val_labels": lambda values: None}, ["a.npz", "val_labels"]),
    ("rows differ", {"train_labels": lambda values: values[:-1]}, ["a.npz", "train_labels"]),
    ("class", {"test_labels": lambda values: values + 7}, ["a.npz", "test_labels"]),
    ("NaN", {"train_images": lambda values: np.where(values > 250, np.nan, values)}, ["a.npz", "train_images["]),
]
SERIES: list[tuple[str, Break, list[str]]] = [
    ("no number", first_cell, ["r2.csv:10", "'oops'"]),
    ("no column", declare("moves", channels=["x", "z"]), ["r0.csv", "'z'"]),
    ("no file", lambda f: (f / "r4.csv").unlink(), ["r4.csv", "no such file"]),
    ("window too long", declare("moves", window={"length": 500}), ["500"]),
]


@needs("images")
@pytest.mark.parametrize(("change", "words"), [case[1:] for case in IMAGES], ids=[case[0] for case in IMAGES])
@pytest.mark.slow
def test_broken_images(tmp_path: Path, change: Break, words: list[str], monkeypatch: Any, capsys: Any) -> None:
    path = write_images(tmp_path)
    change(tmp_path)
    assert_told(path, words, monkeypatch, capsys)


@needs("arrays")
@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in ARRAYS], ids=[case[0] for case in ARRAYS])
def test_broken_arrays(
    tmp_path: Path, changes: dict[str, Any], words: list[str], monkeypatch: Any, capsys: Any
) -> None:
    assert_told(write_arrays(tmp_path, **changes), words, monkeypatch, capsys)


@needs("series")
@pytest.mark.parametrize(("change", "words"), [case[1:] for case in SERIES], ids=[case[0] for case in SERIES])
def test_broken_series(tmp_path: Path, change: Break, words: list[str], monkeypatch: Any, capsys: Any) -> None:
    path = write_series(tmp_path)
    change(tmp_path)
    assert_told(path, words, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("write", "cases"),
    [
        pytest.param(write_images, 12, marks=needs("images"), id="images"),
        pytest.param(write_arrays, 34, marks=needs("arrays"), id="arrays"),
        pytest.param(write_series, 36, marks=needs("series"), id="series"),
    ],
)
def test_what_is_sound_passes_and_is_drawn(
    tmp_path: Path, write: Callable[[Path], Path], cases: int, monkeypatch: Any, capsys: Any
) -> None:
    path = write(tmp_path)
    code, printed = check(path, monkeypatch, capsys)
    assert code == 0, printed
    ((name, dataset),) = load_site_file(path).datasets.items()
    found = inspect(name, dataset)
    assert sum(counts.cases for counts in found.splits.values()) == cases
    assert found.pictures and found.shapes.total() == cases
    page = (tmp_path / "site.check.html").read_text()
    assert ("<polyline" if name == "moves" else "data:image/png") in page


def init(place: Path, output: Path, classes: list[str] | None = None, **flags: str) -> dict[str, Any]:
    write_site_file(
        place, output, Answers({"site": "here", "dataset": "data", **flags}, parse_classes(classes or []))
    )  # fmt: skip
    inspection = inspect("data", load_site_file(output).datasets["data"])
    assert not inspection.problems and inspection.splits["train"].cases
    dataset: dict[str, Any] = yaml.safe_load(output.read_text())["datasets"]["data"]
    return dataset


@needs("images")
def test_init_of_images_with_masks(tmp_path: Path) -> None:
    write_images(tmp_path / "d")
    found = init(tmp_path / "d", tmp_path / "s.yaml", ["skin=0", "lesion=255"])
    assert found["files"] == ["d/images/*.png"] and found["channels"] == 3
    assert found["masks"]["suffix"] == "_mask" and found["masks"]["label_map"] == {255: 1}


@needs("images")
def test_init_of_images_named_by_a_table(tmp_path: Path) -> None:
    write_images(tmp_path / "d")
    for path in (tmp_path / "d" / "masks").iterdir():
        path.unlink()
    found = init(tmp_path / "d", tmp_path / "s.yaml", label="dx")
    assert found["table"] == {"file": "d/list.csv", "image": "name"}
    assert found["label"] == {"column": "dx", "classes": {"mel": ["mel"], "nv": ["nv"]}}
    assert found["split"]["group"] == "patient_id"


@needs("images")
@pytest.mark.parametrize("splits", [[""], ["train", "val", "test"]])
def test_init_of_class_folders(tmp_path: Path, splits: list[str]) -> None:
    for number in range(18):
        place = tmp_path / "d" / splits[number % len(splits)] / ("nv", "mel")[number // 3 % 2]
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number}.png")
    found = init(tmp_path / "d", tmp_path / "s.yaml", ["nevus=nv", "melanoma=mel"])
    assert found["label"] == {"column": "class", "classes": {"nevus": ["nv"], "melanoma": ["mel"]}}
    named = len(splits) > 1
    assert found["files"] == ["d/{split}/{class}/*.png" if named else "d/{class}/*.png"]
    assert found["split"].get("column") == ("split" if named else None)


@needs("arrays")
def test_init_of_arrays(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    found = init(tmp_path / "a.npz", tmp_path / "s.yaml", ["well=0", "ill=1"])
    assert found == {"kind": "arrays", "file": "a.npz", "classes": {"well": [0], "ill": [1]}}
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "b.npz", x=rng.normal(size=(30, 8, 8)), y=np.arange(30) % 3)
    found = init(tmp_path / "b.npz", tmp_path / "t.yaml")
    assert (found["inputs"], found["labels"]) == ("x", "y") and len(found["classes"]) == 3


def test_a_class_that_a_split_lacks_is_a_warning(tmp_path: Path) -> None:
    """Two deaths in the training part and none in the test: the test says nothing about deaths."""
    parts = ["train"] * 40 + ["test"] * 20 + ["validation"] * 20
    rows = [f"{n},{part},{int(n in (3, 5, 70))}" for n, part in enumerate(parts)]
    (tmp_path / "t.csv").write_text("x,part,died\n" + "\n".join(rows) + "\n")
    table = {
        "kind": "table", "files": ["t.csv"], "features": {"x": "number"}, "split": {"column": "part"},
        "label": {"column": "died", "classes": {"alive": [0], "dead": [1]}},
    }  # fmt: skip
    (dataset,) = load_site_file(write_site(tmp_path, {"t": table})).datasets.values()
    warnings = inspect("t", dataset).warnings
    assert "t: no case of the test split has 'dead', so it says nothing about it" in warnings


@pytest.mark.parametrize(("highest", "told"), [(4095, True), (16383, True), (60000, False), (255, True)])
def test_images_of_16_bits_that_use_few_of_them_are_told(tmp_path: Path, highest: int, told: bool) -> None:
    """A radiograph of 12 bits in a file of 16 is divided by 65535: the network sees it nearly black."""
    path = write_images(tmp_path)
    for number, file in enumerate(sorted((tmp_path / "images").iterdir())):
        if number % 2:  # the others have 8 bits
            grey = np.random.default_rng(number).integers(0, highest, (12, 16)).astype(np.uint16)
            grey[0, 0] = highest
            Image.fromarray(grey).save(file)
    found = inspect("skin", load_site_file(path).datasets["skin"])
    words = f"no image of 16 bits has a value above {highest}, and its values are divided by 65535"
    assert not found.problems and any(words in warning for warning in found.warnings) == told


@pytest.mark.parametrize("swapped", [False, True])
def test_recordings_in_arrays_whose_axes_changed_places_are_told(tmp_path: Path, swapped: bool) -> None:
    """As PTB-XL's are read: n x length x channels. Each time step would be a channel with a mean of its own."""
    values = np.random.default_rng(0).normal(size=(20, 12, 50)).astype(np.float32)
    np.savez(tmp_path / "ecg.npz", x=values.transpose(0, 2, 1) if swapped else values, y=np.arange(20) % 2)
    label = {"column": "y", "classes": {"well": [0], "ill": [1]}}
    path = write_site(tmp_path, {"ecg": {"kind": "series", "files": ["ecg.npz"], "inputs": "x", "label": label}})
    found = inspect("ecg", load_site_file(path).datasets["ecg"])
    words = "a window has 50 channels and 12 time steps; if the arrays are n x length x channels, swap"
    assert not found.problems and any(words in warning for warning in found.warnings) == swapped
