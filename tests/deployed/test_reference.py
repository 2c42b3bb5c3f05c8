# SPDX-License-Identifier: Apache-2.0
"""What an export says of its model's inputs is enough to make them: numpy alone gives what the package gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import JsonValue

from hospitals import write_table
from medpfl.core.errors import DataError
from medpfl.data.arrays.prepare import ArraysPreparation
from medpfl.data.cells import Cells
from medpfl.data.images.new import ImagesPreparation
from medpfl.data.pixels import CENTRE, SPREAD, resize
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.series.recordings import SeriesPreparation
from medpfl.data.site_file import load_site_file
from medpfl.data.table.new import TablePreparation
from medpfl.data.target import Target
from medpfl.deployed.reference import image, mask, prepared, resized, shares
from medpfl.deployed.torchscript import _meaning
from medpfl.tasks.region_segmentation import RegionSegmentation

RNG = np.random.default_rng(0)


def told(preparation: Preparation, size: tuple[int, ...] = (), shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """What medpfl.json says; ``test_export`` shows that an export writes the same keys."""
    content: dict[str, JsonValue] = preparation.model_dump(mode="json")
    scaling = {"maximum": {"uint8": 255, "uint16": 65535}, "centre": CENTRE, "spread": SPREAD}
    return {"preparation": content, "grid": {"size": list(size) or None, "scaling": scaling}, "input": {"shape": shape}}


def expected(preparation: Preparation, path: Path, spec: Spec) -> np.ndarray[Any, Any]:
    return torch.cat([case.inputs for case in preparation.new_cases(path, spec)]).numpy()


@pytest.mark.parametrize("before", [(37, 50), (8, 64), (20, 20), (5, 7)])
@pytest.mark.parametrize("after", [(20, 20), (9, 64), (48, 31), (1, 1)])
def test_antialiased_resizing_is_torchs(before: tuple[int, int], after: tuple[int, int]) -> None:
    planes = RNG.normal(100, 50, (2, *before)).astype(np.float32)
    found = resize(torch.from_numpy(planes)[None], after)[0].numpy()
    np.testing.assert_allclose(resized(planes, after), found, atol=1e-3)
    np.testing.assert_allclose(resized(planes, after) / 255, found / 255, atol=2e-6)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.ppm", "a.tif", "grey.png", "grey.pgm", "deep.png", "clear.png"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images(tmp_path: Path, name: str, channels: Any) -> None:
    pixels = RNG.integers(0, 256, (45, 33, 3), dtype=np.uint8)
    kinds = {"grey": pixels[..., 0], "deep": pixels[..., 0].astype(np.uint16) * 200, "clear": pixels[..., [0, 1, 2, 0]]}
    Image.fromarray(kinds.get(name.split(".")[0], pixels)).save(tmp_path / name)
    preparation = ImagesPreparation(channels=channels)
    wanted = expected(preparation, tmp_path / name, Spec("class", ("images",), (24, 20)))
    found = prepared(tmp_path / name, told(preparation, (24, 20)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    if name == "a.ppm":  # the pixels themselves do, too
        np.testing.assert_allclose(image(pixels, told(preparation, (24, 20)))[None], wanted, atol=1e-5)


def test_masks_in_the_images_own_size() -> None:
    outputs = RNG.normal(size=(3, 12, 10)).astype(np.float32)
    wanted = resize(torch.from_numpy(outputs)[None].softmax(dim=1), (31, 44))[0]
    found = mask(outputs, (31, 44), {"output": {}})
    assert found.dtype == np.uint8 and (found == wanted.argmax(dim=0).numpy()).mean() > 0.999


def test_masks_of_regions_that_overlap() -> None:
    task = RegionSegmentation(dataset="brain", size=(16, 16), regions={"whole": (1, 2), "core": (2,)}, written=(1, 2))
    outputs = RNG.normal(size=(2, 16, 16)).astype(np.float32)
    said = _meaning(task, torch.from_numpy(outputs)[None])
    assert said["written"] == [1, 2]
    readout = task.spec.readout
    wanted = resize(readout.shares(torch.from_numpy(outputs)[None]), (31, 44))[0].numpy()
    np.testing.assert_allclose(shares(outputs, (31, 44), {"output": said}), wanted, atol=1e-5)
    found = mask(outputs, (31, 44), {"output": said})
    assert (found == readout.classes(wanted)).mean() > 0.999 and set(np.unique(found)) == {0, 1, 2}


def test_tables_with_renamed_columns_codes_and_missing_cells(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    text = (tmp_path / "blood.csv").read_text().replace("sex", "Geschlecht", 1).replace(",m,", ",1.0,")
    (tmp_path / "blood.csv").write_text(text.replace("p00,40,", "p00,-9.0,"))
    declared = "    missing: ['-9']\n    rename: {Geschlecht: sex}\n    codes: {sex: {1: m}}\n"
    text = path.read_text().replace("  blood:\n", f"  blood:\n{declared}")
    path.write_text(text.replace("kind: table", "kind: table\n    missing_rows: impute"))
    spec = Spec("class", ("rows",))
    preparation = load_site_file(path).datasets["blood"].load(spec).preparation
    assert preparation is not None
    found = prepared(tmp_path / "blood.csv", told(preparation))
    np.testing.assert_allclose(found, expected(preparation, tmp_path / "blood.csv", spec), atol=1e-6)
    assert len(found) == 40 and np.abs(found).max() > 1
    (tmp_path / "blood.csv").write_text("age,crp\n1,2\n")
    with pytest.raises(ValueError, match="expected one column 'sex', got age, crp"):
        prepared(tmp_path / "blood.csv", told(preparation))


def test_rows_without_header_line_and_answer(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    lines = [line.split(",") for line in (tmp_path / "blood.csv").read_text().splitlines()]
    place = lines[0].index("sick")
    lines = [[line[place], *line[:place], *line[place + 1 :]] for line in lines]
    names = ["krank", *lines[0][1:]]
    (tmp_path / "blood.csv").write_text("\n".join(",".join(line) for line in lines[1:]))
    declared = f"    columns: [{', '.join(names)}]\n    rename: {{krank: sick}}\n"
    path.write_text(path.read_text().replace("  blood:\n", f"  blood:\n{declared}"))
    spec = Spec(Target.CLASS, ("rows",))
    preparation = load_site_file(path).datasets["blood"].load(spec).preparation
    assert preparation is not None
    (tmp_path / "new.csv").write_text("\n".join(",".join(line[1:]) for line in lines[1:]))
    for name in ("blood.csv", "new.csv"):
        found = prepared(tmp_path / name, told(preparation))
        np.testing.assert_allclose(found, expected(preparation, tmp_path / name, spec), atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1,2,3\n4,5,6,7", r"a\.csv:3: expected 3 columns, got 4"),  # 4,5 is a decimal comma: 6 would be y
        ("1,2,3\n4,5", r"a\.csv:3: expected 3 columns, got 2"),
        ('1,2,"3\n4,5,6\n7,8,9', r"a\.csv: unexpected end of data"),  # one row of three
        ("1,2,3\n4,5,1_000", r"column 'y': expected a number, got '1_000'"),
        ("1,2,3\n4,5,nan", r"column 'y': expected a number, got 'nan'"),
        ("1,2,3\n4,5,1e999", r"column 'y': expected a number, got '1e999'"),
        ("1,2,3\n4,5,much", r"column 'y': expected a number, got 'much'"),
        ("1,2,3\n4,7,5", r"column 'kind': '7' is not among 1, 2, 5"),
    ],
)
@pytest.mark.parametrize("kind", ["table", "series"])
def test_rows_that_predict_refuses(tmp_path: Path, kind: str, rows: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(f"x,kind,y\n{rows}\n")
    preparation: Preparation = TablePreparation(
        cells=Cells(), features={"x": "number", "kind": [1, 2, 5], "y": "number"}, label="sick", imputed={},
        mean=[0] * 4, scale=[1] * 4,
    )  # fmt: skip
    if kind == "series":
        if "kind" in words:
            return
        preparation = SeriesPreparation(
            cells=Cells(), channels=["x", "y"], inputs=None, label="act", missing_samples="refuse", length=1, step=1,
            mean=[0, 0], scale=[1, 1],
        )  # fmt: skip
    with pytest.raises(DataError):
        expected(preparation, tmp_path / "a.csv", Spec(Target.CLASS, (preparation.form,)))
    with pytest.raises(ValueError, match=words):
        prepared(tmp_path / "a.csv", told(preparation))


def test_images_that_predict_refuses(tmp_path: Path) -> None:
    small = [Image.fromarray(np.full((8, 8), value, np.uint8)) for value in (10, 200)]
    small[0].save(tmp_path / "two.tif", save_all=True, append_images=small[1:])
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "fractions.tif")
    Image.fromarray(np.full((8, 8), 70000, np.int32)).save(tmp_path / "large.tif")
    preparation = ImagesPreparation(channels=1)
    for name, words in (
        ("two", "expected one picture, got 2"),
        ("fractions", "expected whole numbers of 8 or 16 bits, got fractions"),
        ("large", "expected values of 8 or 16 bits, got 70000 to 70000"),
    ):
        with pytest.raises(DataError, match=words):
            expected(preparation, tmp_path / f"{name}.tif", Spec(Target.CLASS, ("images",), (4, 4)))
        with pytest.raises(ValueError, match=words):
            prepared(tmp_path / f"{name}.tif", told(preparation, (4, 4)))


@pytest.mark.parametrize("missing", ["refuse", "interpolate"])
def test_recordings(tmp_path: Path, missing: Any) -> None:
    values = RNG.normal(size=(30, 2)).round(4).astype(str)
    if missing == "interpolate":
        values[0, 0] = values[7, 1] = values[8, 1] = ""
    (tmp_path / "a.tsv").write_text("\n".join(["x\tnote\ty", *(f"{x}\t?\t{y}" for x, y in values)]))
    preparation = SeriesPreparation(
        cells=Cells(), channels=["y", "x"], inputs=None, label="act", missing_samples=missing, length=8, step=3,
        mean=[0.1, -0.2], scale=[0.9, 1.1],
    )  # fmt: skip
    found = prepared(tmp_path / "a.tsv", told(preparation))
    assert found.shape == (8, 2, 8)
    np.testing.assert_array_equal(found, expected(preparation, tmp_path / "a.tsv", Spec("class", ("windows",))))


@pytest.mark.parametrize("layout", [None, "NHWC", "NCHW"])
def test_arrays(tmp_path: Path, layout: Any) -> None:
    values = RNG.integers(0, 256, (4, 3, 30, 26) if layout == "NCHW" else (4, 30, 26, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=values)
    preparation = ArraysPreparation(
        inputs="x", layout=layout, dtype="uint8", mean=[127.5, 120, 100], scale=[63.75, 60, 50]
    )
    found = prepared(tmp_path / "a.npz", told(preparation, (12, 16), ("batch", 3, 12, 16)))
    wanted = expected(preparation, tmp_path / "a.npz", Spec("class", ("images",), (12, 16)))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_what_it_does_not_prepare_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prepares images, table, series, arrays; the model was trained on volumes"):
        prepared(tmp_path / "a.nii", {"preparation": {"kind": "volumes"}})
    (tmp_path / "empty.csv").write_text("\n")
    table = TablePreparation(cells=Cells(), features={"x": "number"}, label="y", imputed={}, mean=[0], scale=[1])
    with pytest.raises(ValueError, match="it has no rows"):
        prepared(tmp_path / "empty.csv", told(table))
    with pytest.raises(ValueError, match="of 8 or 16 bits"):
        image(np.zeros((4, 4), np.float32), told(ImagesPreparation(channels=1), (2, 2)))


NUMBERS = RNG.random((3, 9, 9))
WHOLE = (NUMBERS * 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("values", "declared", "words"),
    [
        (NUMBERS, {}, "is of type float64; the model was trained on uint8"),
        (WHOLE.astype(np.uint16), {}, "is of type uint16; the model was trained on uint8"),
        (WHOLE, {"dtype": "float32"}, "is of type uint8; the model was trained on float32"),
        (np.where(NUMBERS > 0.9, np.nan, NUMBERS), {"dtype": "float64"}, "not finite"),
        (np.where(NUMBERS > 0.9, 1e300, NUMBERS), {"dtype": "float64"}, "not finite, or too large"),
        (np.stack([WHOLE] * 3, axis=-1), {}, "has 3 channels; the model was trained on 1"),  # were nine pictures
        (WHOLE, {"mean": [0, 0, 0], "scale": [1, 1, 1]}, "has 1 channels; the model was trained on 3"),
        (WHOLE[:, None], {"layout": "NHW"}, r"expected the axes NHW, got the shape \(3, 1, 9, 9\)"),
        (WHOLE[:, :3, :, None].repeat(3, axis=3), {"mean": [0] * 3, "scale": [1] * 3}, "which axis is what"),
        (WHOLE[:, None].repeat(9, axis=1), {}, r"has the shape \(3, 9, 9, 9\); the model takes inputs of 8 x 8"),
    ],
)
def test_arrays_that_predict_refuses(tmp_path: Path, values: Any, declared: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "a.npz", x=values)
    usual = {"inputs": "x", "layout": None, "dtype": "uint8", "mean": [127.5], "scale": [63.75]}
    preparation = ArraysPreparation(**{**usual, **declared})
    with pytest.raises(DataError):
        expected(preparation, tmp_path / "a.npz", Spec(Target.CLASS, ("images",), (8, 8)))
    with pytest.raises(ValueError, match=words):
        prepared(tmp_path / "a.npz", told(preparation, (8, 8), ("batch", len(preparation.mean), 8, 8)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (NUMBERS[:, :1], r"expected n x 3 channels x length, got the shape \(3, 1, 9\)"),  # was three times the same
        (NUMBERS[0], r"expected n x 3 channels x length, got the shape \(9, 9\)"),
        (np.where(NUMBERS > 0.9, np.inf, NUMBERS)[:, :3], "not finite"),
        (NUMBERS[:, :3] + 1j, "expected real numbers, got the type complex128"),
        (NUMBERS[:, :3, :4], r"expected at least 5 time steps \(a window\), got 4"),
        (np.where(np.arange(3)[:, None] == 1, np.nan, NUMBERS[:, :3]), "samples are missing"),
    ],
)
def test_arrays_of_recordings_that_predict_refuses(tmp_path: Path, values: Any, words: str) -> None:
    np.savez(tmp_path / "a.npz", x=values)
    preparation = SeriesPreparation(
        cells=Cells(), channels=None, inputs="x", label="act", missing_samples="interpolate", length=5, step=3,
        mean=[0, 1, 2], scale=[1, 2, 3],
    )  # fmt: skip
    with pytest.raises(DataError):
        expected(preparation, tmp_path / "a.npz", Spec(Target.CLASS, ("windows",)))
    with pytest.raises(ValueError, match=words):
        prepared(tmp_path / "a.npz", told(preparation))


def test_files_that_hold_no_arrays(tmp_path: Path) -> None:
    preparation = ArraysPreparation(inputs=None, layout=None, dtype="uint8", mean=[127.5], scale=[63.75])
    np.savez(tmp_path / "other.npz", x=WHOLE)
    np.savez(tmp_path / "whole.npz", test_images=WHOLE)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:-40])
    np.save(tmp_path / "alone.npy", WHOLE)
    for name, words in (
        ("other.npz", "train_images, val_images, test_images; the file has: x"),
        ("alone.npy", "expected an .npz file"),
        ("cut.npz", "cannot be read as an .npz file"),
    ):
        with pytest.raises(ValueError, match=words):
            prepared(tmp_path / name, told(preparation, (8, 8), ("batch", 1, 8, 8)))


def test_pixels_without_pillow_begin_and_end_where_the_file_says(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)
    preparation, file = ImagesPreparation(channels=3), tmp_path / "a.ppm"
    for first in (ord("#"), ord("\n")):  # a pixel, no comment and no blank
        pixels[0, 0, 0] = first
        file.write_bytes(b"P6\n5 6\n255\n" + pixels.tobytes() + b"\n")  # and a blank at the end
        wanted = expected(preparation, file, Spec(Target.CLASS, ("images",), (6, 5)))
        np.testing.assert_allclose(prepared(file, told(preparation, (6, 5))), wanted, atol=1e-6)
    file.write_bytes(b"P6\n5 6\n255\n" + pixels.tobytes()[:-3])
    with pytest.raises(ValueError, match="expected 5 x 6 pixels, and the file ends before"):
        prepared(file, told(preparation, (6, 5)))
    np.save(tmp_path / "four.npy", np.concatenate([pixels, pixels[..., :1]], axis=2))
    with pytest.raises(ValueError, match="expected H x W or H x W x 3"):
        prepared(tmp_path / "four.npy", told(preparation, (6, 5)))
