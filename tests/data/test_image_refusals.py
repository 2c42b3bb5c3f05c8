# SPDX-License-Identifier: Apache-2.0
"""Broken image data: one sentence with the file and row or key, what was expected and what is there."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from test_site_file import fuzz, only_site_file_errors, values

from medpfl.core.errors import DataError, MedPFLError, SiteFileError
from medpfl.data.declared import Problems
from medpfl.data.preparation import Spec
from pictures import CLASSES, FOLDERS, MASKS, TABLE, images, write_folders, write_images

Break = Callable[[Path], None]


def without(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def holding(name: str, content: bytes | str) -> Break:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def changed(old: str, new: str) -> Break:
    def change(folder: Path) -> None:
        text = (folder / "list.csv").read_text()
        assert old in text
        (folder / "list.csv").write_text(text.replace(old, new, 1))

    return change


def cut(name: str, keep: float) -> Break:
    def shorten(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return shorten


def saved(name: str, array: Any) -> Break:
    return lambda folder: Image.fromarray(np.asarray(array)).save(folder / name)


def nothing(folder: Path) -> None:
    pass


ONE, MASK = "images/i00.png", "masks/i00_mask.png"
EMPTY, WHITE = np.zeros((12, 10), np.uint8), np.full((12, 10), 255, np.uint8)
LINES = "id,lesion,dx,site\n"


@pytest.mark.parametrize(
    ("broken", "changes", "words"),
    [
        (nothing, {"files": "pictures/*.png"}, ["pictures/*.png: there is no such file"]),
        (nothing, {"files": ["images/*.png", "more/*.jpg"]}, ["more/*.jpg: there is no such file"]),
        (nothing, {"masks": {**MASKS, "files": "mask/*.png"}}, ["mask/*.png: there is no such file"]),
        (nothing, {"masks": {**MASKS, "suffix": "_m"}}, ["list.csv:2", "i00.png has no mask", "expected one i00_m"]),
        (without("list.csv"), {}, ["list.csv: no such file"]),
        (holding("list.csv", ""), {}, ["list.csv: it has no rows"]),
        (holding("list.csv", LINES), {}, ["list.csv: it has no rows"]),
        (holding("list.csv", b"\xff\xfe\x00"), {}, ["list.csv: expected a table as text in UTF-8"]),
        (
            nothing,
            {"table": {"file": "list.csv", "image": "name"}},
            ["column 'name' is missing", "id, lesion, dx, site"],
        ),
        (changed("dx", "class"), {}, ["list.csv: column 'dx' is missing", "id, lesion, class, site"]),
        (changed("dx", "site"), {}, ["list.csv: column 'dx' is missing"]),
        (nothing, {"split": {"group": "patient"}}, ["list.csv: column 'patient' is missing"]),
        (nothing, {"table": {**TABLE["table"], "where": {"hospital": ["a"]}}}, ["column 'hospital' is missing"]),
        (nothing, {"table": {**TABLE["table"], "where": {"site": ["c"]}}}, ["list.csv: no row has site in ['c']"]),
        (changed("i00,l0,nv,a", "i00,l0,nv"), {}, ["list.csv:2: expected 4 columns, got 3"]),
        (changed("i00", "i99"), {}, ["list.csv:2: the image 'i99' does not exist (files: images/*.png)"]),
        (without(ONE), {}, ["list.csv:2: the image 'i00' does not exist"]),
        (changed("i00", "other/i00"), {}, ["list.csv:2: the image 'other/i00' does not exist"]),
        (changed("i01", "i00"), {}, ["list.csv:3: the image 'i00' has another row, list.csv:2"]),
        (
            saved("images/i00.bmp", EMPTY),
            {"files": "images/*"},
            ["list.csv:2", "'i00' names several: ", "images/i00.bmp"],
        ),
        (
            changed("l0,nv", "l0,NV"),
            {},
            ["list.csv:2: column 'dx': 'NV' is not among the declared values (nv, bkl, mel)"],
        ),
        (changed("l0,nv", "l0,"), {}, ["list.csv:2: column 'dx': '' is not among"]),
        (changed("i00,l0", "i00,"), {}, ["list.csv:2: column 'lesion' is empty; every image needs a group"]),
        (nothing, {"split": {"column": "site"}}, ["list.csv:2: 'site' must be train, validation or test, got 'a'"]),
        (holding("list.csv", LINES + "i00,l,nv,a\n"), {}, ["list.csv: 1 groups cannot be cut into 3 splits"]),
        (
            without(MASK),
            {},
            ["list.csv:2: the image images/i00.png has no mask; expected one i00_mask among masks/*.png"],
        ),
        (saved("masks/i00_mask.bmp", EMPTY), {"masks": {**MASKS, "files": "masks/*"}}, ["i00.png has several masks: "]),
        (
            saved(MASK, np.zeros((10, 12), np.uint8)),
            {},
            ["i00_mask.png", "proportions of its image i00.png, 12 x 10", "10 x 12"],
        ),
        (saved(MASK, EMPTY + 7), {}, ["i00_mask.png: label value 7 is not declared; expected 0 to 1 (or 255 by"]),
        (
            saved(MASK, np.dstack([EMPTY, WHITE, EMPTY])),
            {},
            ["i00_mask.png: expected a mask with one value a pixel", "colour"],
        ),
        (cut(MASK, 0.7), {}, ["i00_mask.png: cannot be read as an image: "]),
        (cut(ONE, 0.7), {}, ["i00.png: cannot be read as an image: "]),
        (holding(ONE, ""), {}, ["i00.png: expected an image (PNG, JPEG,"]),
        (holding(ONE, "GIF89a" + 40 * "\0"), {}, ["i00.png: expected an image (PNG, JPEG,"]),
        (holding(ONE, b"\x89PNG\r\n\x1a\n" + bytes(40)), {}, ["i00.png: "]),
    ],
)
@pytest.mark.slow
def test_each_broken_hospital(tmp_path: Path, broken: Break, changes: dict[str, Any], words: list[str]) -> None:
    write_images(tmp_path)
    broken(tmp_path)
    with pytest.raises(DataError) as caught:
        images(tmp_path, **changes).load(Spec("mask", ("images",), (8, 8)))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    problems = Problems(keep=True)
    try:
        listing = images(tmp_path, **changes).cases(problems)
    except DataError:  # the table itself cannot be read
        return
    reading = images(tmp_path, **changes)
    for case in (case for cases in listing.values() for case in cases):
        try:
            reading.read(case)
        except DataError as error:
            problems.add(str(error))
    assert any(all(word in text for word in words) for text in problems.found)


def test_a_truncated_jpeg_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(
        tmp_path / "images/i00.jpg"
    )
    (tmp_path / ONE).unlink()
    cut("images/i00.jpg", 0.8)(tmp_path)
    with pytest.raises(DataError, match=r"i00\.jpg: cannot be read as an image: .*truncated"):
        images(tmp_path, files="images/*").load(Spec("class", ("images",), (8, 8)))


def test_folders(tmp_path: Path) -> None:
    write_folders(tmp_path)
    Image.fromarray(EMPTY).save(tmp_path / "by/train/nv/0.png")
    (tmp_path / "by" / "later" / "nv").mkdir(parents=True)
    Image.fromarray(EMPTY).save(tmp_path / "by/later/nv/99.png")
    with pytest.raises(DataError, match=r"by/later/nv/99\.png: 'split' must be train, validation or test, got 'later'"):
        images(tmp_path, FOLDERS).cases(Problems())
    with pytest.raises(
        DataError, match=r"by/later/nv/99.png: column 'dx': 'nv' is not among the declared values \(x, mel\)"
    ):
        images(tmp_path, FOLDERS, label={"column": "dx", "classes": {"a": ["x"], "b": ["mel"]}}).cases(Problems())


def test_a_mask_of_two_images(tmp_path: Path) -> None:
    for name in ("one/a/1.png", "one/b/1.png", "mask/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(EMPTY).save(tmp_path / name)
    masks = {"files": "mask/*.png", "labels": MASKS["labels"]}
    with pytest.raises(DataError, match=r"one/b/1\.png: the mask mask/1\.png fits one/b/1\.png and one/a/1\.png"):
        images(tmp_path, files="one/*/*.png", table=None, label=None, masks=masks, split=None).cases(Problems())


def test_a_target_that_is_not_declared(tmp_path: Path) -> None:
    write_images(tmp_path)
    for target, key in (("class", "label"), ("mask", "masks")):
        with pytest.raises(DataError, match=f"needs images with '{key}', which the dataset does not declare") as caught:
            images(tmp_path, **{key: None}).load(Spec(target, ("images",), (8, 8)))
        assert str(tmp_path) not in caught.value.public and key in caught.value.public


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": []}, ["skin.files", "at least 1"]),
        ({"files": ""}, ["skin.files", "expected a pattern"]),
        ({"files": "images/{1}/*.png"}, ["skin.files", "expected a pattern"]),
        ({"files": "images/{dx/*.png"}, ["skin.files", "expected a pattern"]),
        ({"channels": 2}, ["skin.channels", "1 or 3", "got 2"]),
        ({"label": None, "masks": None}, ["skin", "expected 'masks' or one of label, several"]),
        ({"table": None}, ["skin", "there is no column 'dx'", "no 'table' is declared", "{dx}"]),
        ({"label": None, "split": {"stratify": True}}, ["skin", "'stratify' needs 'label'"]),
        ({"label": {"folder": "x", "classes": {"a": [1], "b": [2]}}}, ["skin.label"]),
        ({"label": {"column": "dx", "classes": {"a": ["nv"], "b": ["nv"]}}}, ["label.classes", "'nv' is listed twice"]),
        ({"table": {"file": "list.csv"}}, ["key 'datasets.skin.table.image' is missing"]),
        ({"table": {**TABLE["table"], "where": {"site": []}}}, ["table.where", "a list of at least one value"]),
        ({"table": {**TABLE["table"], "where": {"site": [True]}}}, ["table.where"]),
        ({"masks": {**MASKS, "labels": {0: "x", 2: "y"}}}, ["skin.masks", "without gaps, got [0, 2]"]),
        ({"masks": {**MASKS, "label_map": {255: 4}}}, ["skin.masks", "255 is mapped to 4"]),
        ({"size": 4}, ["unknown key 'datasets.skin.size'"]),
    ],
)  # fmt: skip
def test_declarations(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SiteFileError) as caught:
        images(tmp_path, **changes)
    for word in ["site.yaml", *words]:
        assert word in str(caught.value)


CELL = st.sampled_from(
    ["i00", "i01", "i02.png", "l0", "l1", "nv", "mel", "a", "", "i", " ", "../i00", "images/i03"]
) | st.text(st.characters(exclude_categories=("Cs",)), max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(CELL, min_size=3, max_size=5), max_size=6), header=st.booleans())
@pytest.mark.slow
def test_no_table_crashes(tmp_path: Path, rows: list[list[str]], header: bool) -> None:
    if not (tmp_path / "list.csv").exists():
        write_images(tmp_path, count=4, size=(4, 4))
    lines = [",".join(cells) for cells in rows]
    (tmp_path / "list.csv").write_text("\n".join([LINES.strip(), *lines] if header else lines), encoding="utf-8")
    dataset = images(tmp_path, masks=None)
    problems = Problems(keep=True)
    try:
        listing = dataset.cases(problems)
    except MedPFLError as error:
        assert str(error).startswith(str(tmp_path))
        return
    for case in (case for cases in listing.values() for case in cases):
        assert case.path.is_file() and case.label >= 0 and case.group
    if not problems.found:
        assert listing["train"] and listing["test"]


@fuzz
@given(place=st.sampled_from([(), ("table",), ("table", "where"), ("label",), ("masks",), ("split",)]), data=st.data())
@pytest.mark.parametrize("kind", ["images", "arrays"])
@pytest.mark.slow
def test_any_declaration(
    tmp_path_factory: pytest.TempPathFactory, kind: str, place: tuple[str, ...], data: Any
) -> None:
    dataset = copy.deepcopy({**TABLE, "table": {**TABLE["table"], "where": {"site": ["a"]}}})
    if kind == "arrays":
        dataset = {"kind": "arrays", "file": "a.npz", "inputs": "x", "labels": "y", "layout": "NHW", "classes": CLASSES}
        dataset["split"] = {"lists": {"file": "a.json", "train": 0, "test": 1}}
    inner = dataset
    for key in place:
        inner = inner.get(key, inner)
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(values)
    text = yaml.safe_dump({"datasets": {"skin": dataset}})
    only_site_file_errors(tmp_path_factory, lambda path: path.write_text(text, encoding="utf-8"))
