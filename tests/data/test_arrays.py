# SPDX-License-Identifier: Apache-2.0
"""Arrays: .npz files that NumPy wrote, in MedMNIST's format and others; broken ones get one sentence."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.arrays import npz
from medpfl.data.arrays.declare import Arrays
from medpfl.data.arrays.npz import Npz
from medpfl.data.arrays.prepare import channels_first, new_rows
from medpfl.data.declared import Problems
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file

CLASSES = {"healthy": [0], "ill": [1, 2]}
Content = dict[str, NDArray[Any]]


def medmnist(**changes: NDArray[Any]) -> Content:
    rng = np.random.default_rng(0)
    content: Content = {}
    for part, count in (("train", 8), ("val", 3), ("test", 4)):
        content[f"{part}_images"] = rng.integers(0, 256, (count, 9, 7), dtype=np.uint8)
        content[f"{part}_labels"] = (np.arange(count) % 3).astype(np.uint8)[:, None]
    return {**content, **changes}


def own(**changes: NDArray[Any]) -> Content:
    rng = np.random.default_rng(1)
    content = {"x": rng.normal(5, 3, (12, 6, 5, 3)), "y": np.arange(12) % 2, "who": np.arange(12) // 2}
    return {**content, **changes}


OWN: dict[str, Any] = {"inputs": "x", "labels": "y", "split": {"group": "who"}}


def declare(folder: Path, content: Content | None = None, memory_gb: float = 4.0, **keys: Any) -> Arrays:
    if content is not None:
        np.savez_compressed(folder / "a.npz", **content)
    dataset = {"kind": "arrays", "file": "a.npz", "classes": CLASSES, **keys}
    site_file = {"storage": {"memory_gb": memory_gb}, "datasets": {"a": dataset}}
    (folder / "site.yaml").write_text(yaml.safe_dump(site_file))
    return load_site_file(folder / "site.yaml").dataset("a", Arrays)


def test_medmnist_as_it_is(tmp_path: Path) -> None:
    content = medmnist()
    dataset = declare(tmp_path, content)
    data = dataset.load(Spec("class", ("images",), (9, 7)))
    for split, part in (("train", "train"), ("validation", "val"), ("test", "test")):
        samples, raw = data.splits[split], content[f"{part}_images"]
        assert torch.equal(samples.inputs[:], torch.from_numpy((raw[:, None].astype(np.float32) - 127.5) / 63.75))
        assert samples.targets.tolist() == [int(label > 0) for label in content[f"{part}_labels"][:, 0]]
        assert samples.names[1] == f"{part}_images[1]"
        for case, image in zip(dataset.cases(Problems())[split], raw, strict=True):
            assert np.array_equal(dataset.read(case).image, image[None])
    assert data.preparation.mean == [127.5] and data.class_names == ["healthy", "ill"]
    assert declare(tmp_path).load(Spec("class", ("images",), (4, 4))).splits["test"].inputs.shape == (4, 1, 4, 4)


def test_own_keys_split_by_group_and_standardised_by_the_training_part(tmp_path: Path) -> None:
    content = own()
    data = declare(tmp_path, content, **OWN).load(Spec("class", ("images",), (6, 5)))
    chosen = {split: [int(name[2:-1]) for name in samples.names] for split, samples in data.splits.items()}
    assert sorted(row for rows in chosen.values() for row in rows) == list(range(12))
    assert all(row ^ 1 in rows for rows in chosen.values() for row in rows)  # two rows of one patient
    train = content["x"][chosen["train"]]
    mean, deviation = train.mean(axis=(0, 1, 2)), train.std(axis=(0, 1, 2))
    for split, rows in chosen.items():
        expected = np.moveaxis((content["x"][rows] - mean) / deviation, 3, 1)
        np.testing.assert_allclose(data.splits[split].inputs[:].numpy(), expected, atol=1e-5)
    assert data.preparation.mean == pytest.approx(mean.tolist())


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((2, 8, 9), None, (2, 1, 8, 9)),
        ((2, 8, 9, 3), None, (2, 3, 8, 9)),
        ((2, 1, 8, 9), None, (2, 1, 8, 9)),
        ((2, 7, 8, 9), None, (2, 1, 7, 8, 9)),
        ((2, 2, 8, 9), "NCHW", (2, 2, 8, 9)),
        ((2, 3, 8, 9), "NDHW", (2, 1, 3, 8, 9)),
        ((2, 3, 9, 3), "NHWC", (2, 3, 3, 9)),
        ((2, 5, 8, 9, 2), "NDHWC", (2, 2, 5, 8, 9)),
        ((2, 2, 5, 8, 9), "NCDHW", (2, 2, 5, 8, 9)),
    ],
)
def test_layouts(tmp_path: Path, shape: tuple[int, ...], layout: str | None, expected: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    content = {"x": np.repeat(values, 6, axis=0), "y": np.arange(12) % 2}
    dataset = declare(tmp_path, content, inputs="x", labels="y", layout=layout)
    data = dataset.load(Spec("class", ("images",), expected[2:]))
    assert data.splits["train"].inputs.shape[1:] == expected[1:]
    case = dataset.cases(Problems())["train"][0]
    image = channels_first(content["x"][case.row : case.row + 1], layout or {3: "NHW"}.get(len(shape), guess(shape)))[0]
    assert np.array_equal(dataset.read(case).image, image) and image.shape == expected[1:]


def guess(shape: tuple[int, ...]) -> str:
    return "NHWC" if shape[-1] == 3 else "NCHW" if shape[1] == 1 else "NDHW"


def test_a_split_column_and_lists(tmp_path: Path) -> None:
    part = np.array(["train", "val", "test"])[np.arange(12) % 3]
    data = declare(tmp_path, own(part=part), **{**OWN, "split": {"column": "part"}}).load(
        Spec("class", ("images",), (6, 5))
    )
    assert data.splits["test"].names == ["x[2]", "x[5]", "x[8]", "x[11]"]
    lists = [[0, 1], [2], [14, 3, 10, 5], [8, 12, 4], [6]]
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    rule = {"lists": {"file": "lists.json", "train": 2, "test": 3, "validation": 4}}
    data = declare(tmp_path, medmnist(), split=rule).load(Spec("class", ("images",), (9, 7)))
    assert data.splits["train"].names == ["train_images[3]", "train_images[5]", "val_images[2]", "test_images[3]"]
    assert data.splits["test"].names == ["train_images[4]", "val_images[0]", "test_images[1]"]
    raw = medmnist()["test_images"][3].astype(np.float32)
    assert torch.equal(data.splits["train"].inputs[3, 0], torch.from_numpy((raw - 127.5) / 63.75))


@pytest.mark.slow
def test_beyond_the_memory_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = declare(tmp_path, own(), **OWN).load(Spec("class", ("images",), (4, 4)))
    monkeypatch.setattr(npz, "_BLOCK", 1000)  # a row has 720 bytes
    dataset = declare(tmp_path, memory_gb=1e-9, **OWN)
    streamed = dataset.load(Spec("class", ("images",), (4, 4)))
    for split, samples in kept.splits.items():
        assert type(samples.inputs) is torch.Tensor and type(streamed.splits[split].inputs) is not torch.Tensor
        torch.testing.assert_close(samples.inputs, streamed.splits[split].inputs[:], rtol=0, atol=1e-6)
    case = dataset.cases(Problems())["test"][0]
    assert np.array_equal(dataset.read(case).image, np.moveaxis(own()["x"][case.row], 2, 0))


def test_orders_of_bytes_and_axes(tmp_path: Path) -> None:
    plain = declare(tmp_path, own(), **OWN).load(Spec("class", ("images",), (6, 5)))
    for x in (np.asfortranarray(own()["x"]), own()["x"].astype(">f8")):
        other = declare(tmp_path, own(x=x), **OWN)
        torch.testing.assert_close(
            other.load(Spec("class", ("images",), (6, 5))).splits["train"].inputs, plain.splits["train"].inputs
        )
        case = other.cases(Problems())["train"][0]
        assert np.array_equal(other.read(case).image, np.moveaxis(own()["x"][case.row], 2, 0))


def test_new_rows_are_prepared_as_the_training_rows(tmp_path: Path) -> None:
    for content, keys in ((own(), OWN), (medmnist(), {})):
        data = declare(tmp_path, content, **keys).load(Spec("class", ("images",), (6, 5)))
        named = dict(new_rows(tmp_path / "a.npz", data.preparation, (6, 5)))
        for samples in data.splits.values():
            for name, inputs in zip(samples.names, samples.inputs, strict=True):
                torch.testing.assert_close(named[f"a.npz: {name}"][0], inputs)
    other = {"val_images": medmnist()["val_images"].astype(np.float32)}
    np.savez(tmp_path / "b.npz", **other)
    with pytest.raises(DataError, match=r"'val_images' is of type float32; the model was trained on uint8"):
        list(new_rows(tmp_path / "b.npz", data.preparation, (6, 5)))


def objects(folder: Path) -> None:
    np.savez(folder / "a.npz", **own(y=np.array([{}] * 12, dtype=object)), allow_pickle=True)


def truncated(folder: Path) -> None:
    content = (folder / "a.npz").read_bytes()
    (folder / "a.npz").write_bytes(content[: len(content) // 2])


def damaged(folder: Path) -> None:
    content = bytearray((folder / "a.npz").read_bytes())
    content[1000:1100] = bytes(100)
    (folder / "a.npz").write_bytes(content)


def short(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.npz") as file:
        members = {name: file.read(name) for name in file.namelist()}
    members["x.npy"] = members["x.npy"][:-50]
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        for name, content in members.items():
            file.writestr(name, content)


def no_header(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("x.npy", b"text")
        file.writestr("y.npy", b"\x93NUMPY\x01\x00\x04\x00{{{{")


def half_a_header(folder: Path) -> None:
    """A bit of the shape's closing bracket has flipped; both arrays' headers are as numpy writes them otherwise."""
    with (folder / "y.npy").open("wb") as file:
        np.save(file, own()["y"])
    header = (folder / "y.npy").read_bytes().replace(b"(12,)", b"(12,i")
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("x.npy", header)
        file.writestr("y.npy", header)


def smaller_rows(folder: Path) -> None:
    """A bit of the rows' shape has flipped; the checksum stands behind what nobody would read then."""
    np.savez(folder / "a.npz", **own())
    content = (folder / "a.npz").read_bytes()
    assert content.count(b"(12, 6,") == 1
    (folder / "a.npz").write_bytes(content.replace(b"(12, 6,", b"(12, 4,"))


X = own()["x"]
NAN = np.where(np.arange(X.size).reshape(X.shape) == 500, np.nan, X)


@pytest.mark.parametrize(
    ("content", "broken", "keys", "words"),
    [
        (own(), lambda folder: (folder / "a.npz").unlink(), OWN, ["a.npz: no such file"]),
        (own(), lambda folder: (folder / "a.npz").write_text("x"), OWN, ["a.npz: cannot be read as an .npz file"]),
        (own(), truncated, OWN, ["a.npz: cannot be read as an .npz file"]),
        (own(), damaged, OWN, ["a.npz: cannot be read as an .npz file"]),
        (own(), short, OWN, ["a.npz: array 'x' ends too early: expected", "got"]),
        (own(), smaller_rows, OWN, ["a.npz: array 'x' holds more than its header says: shape (12, 4, 5, 3)"]),
        (own(), no_header, OWN, ["a.npz: cannot be read as an .npz file"]),
        (own(), half_a_header, OWN, ["a.npz: cannot be read as an .npz file", "EOF in multi-line statement"]),
        (own(), objects, OWN, ["a.npz: array 'y' holds Python objects, which are not read"]),
        (own(), None, {**OWN, "inputs": "z"}, ["a.npz: there is no array 'z'; the file has: x, y, who"]),
        (own(), None, {**OWN, "split": {"group": "z"}}, ["there is no array 'z'"]),
        (own(), None, {}, ["expected MedMNIST's arrays train_images", "the file has: x, y, who"]),
        (own(y=np.arange(11)), None, OWN, ["array 'y' has the shape (11,); expected one value for each of 12 rows"]),
        (own(y=np.ones((12, 4))), None, OWN, ["array 'y' has the shape (12, 4)"]),
        (own(y=np.arange(12) % 4), None, OWN, ["a.npz: y[3]: 3 is not among the values (0, 1, 2)"]),
        (own(y=np.full(12, np.nan)), None, OWN, ["a.npz: y[0]: nan is not among"]),
        (own(y=np.zeros(12, complex)), None, OWN, ["array 'y' is of type complex128"]),
        (own(x=X.astype("U4")), None, OWN, ["array 'x' is of type <U4; expected whole or floating-point numbers"]),
        (own(x=np.float64(1)), None, OWN, ["array 'x' is a single value"]),
        (own(x=NAN), None, OWN, ["a.npz: x[5]: holds values that are not finite"]),
        (own(x=np.where(np.isnan(NAN), 1e39, X)), None, OWN, ["a.npz: x[5]: holds values beyond 3.4e+38"]),
        (own(x=np.zeros((12, 0, 5))), None, OWN, ["array 'x' has the shape (12, 0, 5): its rows are empty"]),
        (
            own(x=np.zeros((12, 6, 3, 2))),
            None,
            OWN,
            ["shape (12, 6, 3, 2) does not say which axis is what", "'layout'"],
        ),
        (own(x=np.zeros((12, 9))), None, OWN, ["(12, 9) does not say which axis is what"]),
        (own(), None, {**OWN, "layout": "NHW"}, ["layout NHW has 3 axes, its shape (12, 6, 5, 3) has 4"]),
        (own(x=np.zeros((12, 7, 8, 9))), None, OWN, ["the task's size [6, 5] does not fit arrays of 7 x 8 x 9"]),
        (own(who=np.zeros(12)), None, OWN, ["a.npz: 1 groups cannot be cut into 3 splits"]),
        (own(), None, {**OWN, "split": {"column": "who"}}, ["x[0]: 'who' must be train, validation or test, got '0'"]),
        (medmnist(val_images=np.zeros((3, 9, 7, 3), np.uint8)), None, {}, ["'val_images' is uint8 with 3 channels"]),
        (medmnist(test_labels=np.zeros(9)), None, {}, ["array 'test_labels' has the shape (9,)", "each of 4 rows"]),
    ],
)
def test_refusals(
    tmp_path: Path, content: Content, broken: Callable[[Path], None] | None, keys: dict[str, Any], words: list[str]
) -> None:
    np.savez_compressed(tmp_path / "a.npz", **content)
    if broken:
        broken(tmp_path)
    with pytest.raises(DataError) as caught:
        declare(tmp_path, **keys).load(Spec("class", ("images",), (6, 5)))
    for word in [str(tmp_path)] * ("task's" not in words[0]) + words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ("{", ["lists.json: not valid JSON"]),
        ('{"a": [1]}', ["lists.json: expected a list of lists of row numbers"]),
        ('[[0.5], [1], ["a"]]', ["lists.json: expected a list of lists"]),
        ("[[0], [1]]", ["lists.json: there is no list 2 for test; the file has 2"]),
        ("[[0], [1], [99]]", ["lists.json: list 2: there is no row 99; a.npz has 15 rows"]),
        ("[[0], [1], [-1]]", ["lists.json: list 2: there is no row -1"]),
        ("[[0], [1], [0]]", ["'train_images[0]' is in the train split and in the test split"]),
        ("[[0, 0], [1], [2]]", ["lists.json: list 0: a row is in it twice"]),
        ("[[], [1], [2]]", ["the train split is empty"]),
    ],
)
def test_lists_refused(tmp_path: Path, lists: str, words: list[str]) -> None:
    (tmp_path / "lists.json").write_text(lists)
    rule = {"lists": {"file": "lists.json", "train": 0, "test": 2}}
    with pytest.raises(DataError) as caught:
        declare(tmp_path, medmnist(), split=rule).load(Spec("class", ("images",), (9, 7)))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"inputs": "x"}, ["expected 'inputs' and 'labels', or neither"]),
        ({"split": {"seed": 1}}, ["MedMNIST's format names its splits"]),
        ({**OWN, "layout": "HWC"}, ["layout"]),
        ({"split": {"lists": {"file": "a", "train": 0, "test": 1}, "seed": 3}}, ["so 'seed' has nothing to cut"]),
        ({"split": {"lists": {"file": "a", "train": -1, "test": 1}}}, ["split.lists.train"]),
    ],
)
def test_declarations(tmp_path: Path, keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SiteFileError) as caught:
        declare(tmp_path, own(), **keys)
    for word in words:
        assert word in str(caught.value)


def test_arrays_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path, own())
    monkeypatch.setattr(npz, "_BLOCK", 1500)
    blocks = list(Npz(tmp_path / "a.npz").blocks("x"))
    assert [len(block) for block in blocks] == [2] * 6 and np.array_equal(np.concatenate(blocks), own()["x"])
