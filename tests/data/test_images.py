# SPDX-License-Identifier: Apache-2.0
"""Images: what Pillow wrote comes back as it is meant to be seen, with its label and mask, in one split a lesion."""

import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.data.declared import Problems
from medpfl.data.images.new import ImagesPreparation
from medpfl.data.pixels import image_files, prepare, prepare_mask, read_image, read_mask
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file
from medpfl.deployed.reference import _pixels
from pictures import FOLDERS, MASKS, TABLE, images, write_folders, write_images

GREY = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], axis=-1)


@pytest.mark.parametrize("suffix", ["png", "bmp"])
def test_grey_and_colour(tmp_path: Path, suffix: str) -> None:
    for name, array in (("grey", GREY), ("colour", COLOUR)):
        Image.fromarray(array).save(tmp_path / f"{name}.{suffix}")
    assert np.array_equal(read_image(tmp_path / f"grey.{suffix}", 1), GREY[None])
    assert np.array_equal(read_image(tmp_path / f"grey.{suffix}", 3), np.stack([GREY] * 3))
    assert np.array_equal(read_image(tmp_path / f"colour.{suffix}", 3), COLOUR.transpose(2, 0, 1))
    luma = COLOUR @ [0.299, 0.587, 0.114]
    assert np.abs(read_image(tmp_path / f"colour.{suffix}", 1)[0] - luma).max() <= 1


def test_jpeg_in_grey_colour_and_cmyk(tmp_path: Path) -> None:
    smooth = np.repeat(np.repeat(COLOUR, 8, axis=0), 8, axis=1)
    for mode in ("L", "RGB", "CMYK"):
        Image.fromarray(smooth).convert(mode).save(tmp_path / f"{mode}.jpg", quality=98, subsampling=0)
        got = read_image(tmp_path / f"{mode}.jpg", 3).astype(float)
        expected = np.asarray(Image.fromarray(smooth).convert(mode).convert("RGB")).transpose(2, 0, 1)
        assert got.shape == (3, 32, 48) and np.abs(got - expected).mean() < 4


def test_lab_in_grey_is_the_grey_of_its_colour(tmp_path: Path) -> None:
    """Before, a TIFF in Lab, as Photoshop writes it, ended a job in grey with Pillow's error, which names no file."""
    Image.fromarray(COLOUR).convert("RGB").convert("LAB").save(tmp_path / "lab.tif")
    colour = read_image(tmp_path / "lab.tif", 3)
    expected = np.asarray(Image.fromarray(colour.transpose(1, 2, 0)).convert("L"))
    assert np.array_equal(read_image(tmp_path / "lab.tif", 1)[0], expected) and np.ptp(expected) > 50
    assert np.array_equal(_pixels(tmp_path / "lab.tif", 1), expected)


def test_sixteen_bits_keep_their_precision(tmp_path: Path) -> None:
    deep = (GREY.astype(np.uint16) << 8) + 3
    Image.fromarray(deep).save(tmp_path / "deep.png")
    for channels in (1, 3):
        got = read_image(tmp_path / "deep.png", channels)
        assert got.dtype == np.uint16 and np.array_equal(got, np.stack([deep] * channels))
    full = prepare(np.array([[[0, 65535]]], np.uint16), (1, 2))
    assert torch.equal(full, prepare(np.array([[[0, 255]]], np.uint8), (1, 2))) and full.tolist() == [[[-2.0, 2.0]]]


def test_palettes_alpha_and_single_bits(tmp_path: Path) -> None:
    palette = Image.fromarray((GREY // 10 % 3).astype(np.uint8), mode="P")
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 0, 255])
    palette.save(tmp_path / "palette.png")
    got = read_image(tmp_path / "palette.png", 3)
    assert np.array_equal(got[0], 255 * (GREY // 10 % 3 == 1)) and np.array_equal(got[2], 255 * (GREY // 10 % 3 == 2))
    assert np.array_equal(
        read_mask(tmp_path / "palette.png"), GREY // 10 % 3
    )  # a mask's palette shows, its indices mean
    alpha = np.dstack([COLOUR, np.where(GREY > 100, 255, 0)]).astype(np.uint8)
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    seen = np.where(GREY > 100, COLOUR.transpose(2, 0, 1), 0)
    assert np.array_equal(read_image(tmp_path / "alpha.png", 3), seen)
    Image.fromarray(GREY > 100).save(tmp_path / "bits.png")
    assert np.array_equal(read_image(tmp_path / "bits.png", 1)[0], 255 * (GREY > 100))
    assert np.array_equal(read_mask(tmp_path / "bits.png"), GREY > 100)


@pytest.mark.parametrize("deep", [np.uint8, np.uint16])
@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize(("orientation", "turn"), [(3, 2), (6, 3), (8, 1)])
def test_images_are_turned_as_their_camera_says(
    tmp_path: Path, orientation: int, turn: int, suffix: str, deep: type[np.integer[Any]]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned{suffix}"
    Image.fromarray(GREY.astype(deep)).save(path, exif=exif)
    assert np.array_equal(read_image(path, 1)[0], np.rot90(GREY, turn))
    assert np.array_equal(read_mask(path), np.rot90(GREY, turn))
    assert np.array_equal(_pixels(path, 1), np.rot90(GREY, turn))


def test_a_tiff_of_16_bits_in_which_0_is_white_is_refused(tmp_path: Path) -> None:
    """Scanned films come so. Pillow turns the values of 8 bits over, and leaves those of 16 as they are stored."""
    path = tmp_path / "film.tif"
    for deep in (np.uint8, np.uint16):
        Image.fromarray(GREY.astype(deep)).save(path)
        content = bytearray(path.read_bytes())
        first = int.from_bytes(content[4:8], "little")
        for entry in range(first + 2, first + 2 + 12 * int.from_bytes(content[first : first + 2], "little"), 12):
            if int.from_bytes(content[entry : entry + 2], "little") == 262:  # PhotometricInterpretation
                content[entry + 8 : entry + 10] = bytes(2)
        path.write_bytes(content)
        if deep is np.uint8:
            assert np.array_equal(read_image(path, 1)[0], 255 - GREY) and np.array_equal(_pixels(path, 1), 255 - GREY)
            # Of a mask it would be told in silence that what is marked is the background.
            with pytest.raises(DataError, match=r"film\.tif: 0 is white in this TIFF, so that other values are seen"):
                read_mask(path)
    for read in (read_image, _pixels):
        with pytest.raises((DataError, ValueError), match="expected 0 to be black, and in this TIFF"):
            read(path, 1)


def test_hidden_files_in_a_folder_to_predict_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "in" / ".trash").mkdir(parents=True)
    for name in ("b.png", "in/a.png", ".trash/c.png", "in/.trash/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(GREY).save(tmp_path / name)
    (tmp_path / "._b.png").write_bytes(b"\0\5\x16\7Mac OS X")
    assert image_files(tmp_path) == [tmp_path / "b.png", tmp_path / "in" / "a.png"]


def test_masks_may_be_saved_in_equal_colours(tmp_path: Path) -> None:
    for channels in (3, 4):
        Image.fromarray(np.dstack([GREY] * channels)).save(tmp_path / "mask.png")
        assert np.array_equal(read_mask(tmp_path / "mask.png"), GREY)


@pytest.mark.parametrize("form", ["grey with alpha", "colour", "colour with alpha"])
def test_a_mask_of_16_bits_in_colour_is_refused(tmp_path: Path, form: str) -> None:
    """Pillow reads the upper 8 bits of it: a lesion that is 1 would be the background, as everything is."""
    channels, kind = {"grey with alpha": (2, 4), "colour": (3, 2), "colour with alpha": (4, 6)}[form]
    lesion = np.zeros((4, 6, channels), ">u2")
    lesion[1:3, 2:4] = 1
    lesion[..., -1] |= np.uint16(0xFFFF if channels % 2 == 0 else 0)
    rows = b"".join(b"\0" + row.tobytes() for row in lesion)
    head = struct.pack(">IIBBBBB", 6, 4, 16, kind, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    content = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    path = tmp_path / "mask.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(DataError, match=r"only 8 of its 16 bits are read; save the mask in grey") as refused:
        read_mask(path)
    assert str(refused.value).startswith(str(path))
    assert read_image(path, 3).shape == (3, 4, 6)
    Image.fromarray(lesion[..., 0].astype(np.uint16)).save(path)
    assert np.array_equal(read_mask(path), lesion[..., 0])


def test_a_mask_whose_grey_palette_shows_other_values_than_it_holds_is_refused(tmp_path: Path) -> None:
    """Pillow's ``quantize`` puts white first: of a white lesion on black, the lesion's index is 0."""
    lesion = np.zeros((4, 6), np.uint8)
    lesion[1:3, 2:4] = 255
    for suffix in ("png", "gif"):
        path = tmp_path / f"mask.{suffix}"
        Image.fromarray(lesion).convert("RGB").quantize(2).save(path)
        with pytest.raises(DataError, match=r"its palette shows the value 0 brighter than 1") as refused:
            read_mask(path)
        assert str(refused.value).startswith(str(path))
    darker = Image.fromarray(lesion // 255, mode="P")
    darker.putpalette([0, 0, 0, 255, 255, 255, 128, 128, 128])  # the entry that no pixel has says nothing
    darker.save(tmp_path / "mask.png")
    assert np.array_equal(read_mask(tmp_path / "mask.png"), lesion // 255)


def test_a_mask_that_is_drawn_by_transparency_alone_is_refused(tmp_path: Path) -> None:
    lesion = np.zeros((4, 6), np.uint8)
    lesion[1:3, 2:4] = 255
    for value in (0, 255):
        even = np.full_like(lesion, value)
        for layers in ([even, lesion], [even, even, even, lesion]):
            Image.fromarray(np.dstack(layers)).save(tmp_path / "mask.png")
            with pytest.raises(DataError, match=r"pixels of the value \d+ differ in transparency"):
                read_mask(tmp_path / "mask.png")
    Image.fromarray(np.dstack([lesion] * 4)).save(tmp_path / "mask.png")  # nothing but the lesion is there to be seen
    assert np.array_equal(read_mask(tmp_path / "mask.png"), lesion)


def test_sizes_are_brought_together() -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 40, 30), dtype=np.uint8)
    small = prepare(image, (8, 6))
    pillow = np.asarray(Image.fromarray(image.transpose(1, 2, 0)).resize((6, 8), Image.Resampling.BILINEAR))
    expected = (pillow.transpose(2, 0, 1) / 255 - 0.5) / 0.25
    assert small.dtype == torch.float32 and np.abs(small.numpy() - expected).max() < 0.02  # Pillow rounds to bytes
    mask = (image[0] > 127).astype(np.uint8)
    pillow = np.asarray(Image.fromarray(mask).resize((6, 8), Image.Resampling.NEAREST))
    assert np.array_equal(prepare_mask(mask, (8, 6)).numpy(), pillow)
    assert np.array_equal(prepare_mask(mask, (40, 30)).numpy(), mask)


def test_a_table_says_label_lesion_and_mask(tmp_path: Path) -> None:
    write_images(tmp_path)
    dataset = images(tmp_path)
    listing = dataset.cases(Problems())
    assert {split: len(cases) for split, cases in listing.items()} == {"train": 4, "validation": 4, "test": 4}
    cases = {case.name: case for part in listing.values() for case in part}
    assert len(cases) == 12 and dataset.class_names() == ["benign", "malignant"]
    for number in range(12):
        case = cases[f"images/i{number:02}.png"]
        assert case.label == (number % 3 == 2) and case.group == f"l{number // 2}"
        assert case.where == f"list.csv:{number + 2}" and case.mask.name == f"i{number:02}_mask.png"
        assert dataset.read(case).target == case.label
    lesions = [{case.group for case in part} for part in listing.values()]
    assert sum(map(len, lesions)) == len(set().union(*lesions)) == 6


def test_rows_choose_images(tmp_path: Path) -> None:
    write_images(tmp_path)
    parts = {}
    for sites in (["a"], ["b"], ["a", "b"]):
        listing = images(tmp_path, table={**TABLE["table"], "where": {"site": sites}}).cases(Problems())
        parts["".join(sites)] = {case.name for part in listing.values() for case in part}
    assert len(parts["b"]) == 3 and parts["a"] | parts["b"] == parts["ab"] and not parts["a"] & parts["b"]


@pytest.mark.parametrize("name", ["i{:02}", "i{:02}.png", "images/i{:02}", "images/i{:02}.png"])
@pytest.mark.parametrize("tabs", [False, True])
def test_a_table_may_name_images_with_suffix_or_folder(tmp_path: Path, name: str, tabs: bool) -> None:
    write_images(tmp_path)
    lines = (tmp_path / "list.csv").read_text().splitlines()
    lines[1:] = [line.replace(f"i{n:02}", name.format(n), 1) for n, line in enumerate(lines[1:])]
    file = "list.tsv" if tabs else "list.csv"
    (tmp_path / file).write_text("\n".join(lines).replace(",", "\t" if tabs else ","))
    listing = images(tmp_path, table={"file": file, "image": "id"}).cases(Problems())
    assert sum(map(len, listing.values())) == 12


def test_folders_say_split_and_class(tmp_path: Path) -> None:
    write_folders(tmp_path)
    dataset = images(tmp_path, FOLDERS, channels=1)
    listing = dataset.cases(Problems())
    assert {split: len(cases) for split, cases in listing.items()} == {"train": 4, "validation": 4, "test": 4}
    for split, cases in listing.items():
        for case in cases:
            number = int(case.path.stem)
            assert ("train", "validation", "test")[number % 3] == split and case.label == number // 3 % 2
            assert np.array_equal(dataset.read(case).image, np.full((1, 6, 8), 20 * number))


def test_masks_alone_and_in_patients_folders(tmp_path: Path) -> None:
    for patient in "abcdef":
        for name, value in (("image", 9), ("mask", ord(patient) % 2)):
            (tmp_path / name / patient).mkdir(parents=True)
            Image.fromarray(np.full((4, 4), value, np.uint8)).save(tmp_path / name / patient / "1.png")
    masks = {"files": "mask/{patient}/*.png", "labels": MASKS["labels"]}
    dataset = images(
        tmp_path, files="image/{patient}/*.png", table=None, label=None, masks=masks, split={"group": "patient"}
    )
    assert dataset.class_names() == ["background", "lesion"]
    for cases in dataset.cases(Problems()).values():
        for case in cases:
            target = dataset.read(case).target
            assert isinstance(target, np.ndarray) and (target == ord(case.group) % 2).all()


def test_masks_of_another_resolution(tmp_path: Path) -> None:
    """The public skin masks are three times as fine as the images beside them."""
    write_images(tmp_path)
    for path in (tmp_path / "masks").iterdir():
        Image.open(path).resize((30, 36), Image.Resampling.NEAREST).save(path)
    fine = images(tmp_path, label=None).load(Spec("mask", ("images",), (12, 10)))
    write_images(tmp_path)
    plain = images(tmp_path, label=None).load(Spec("mask", ("images",), (12, 10)))
    for split, samples in plain.splits.items():
        assert torch.equal(samples.targets[:], fine.splits[split].targets[:])
    case = images(tmp_path, label=None).cases(Problems())["train"][0]
    assert images(tmp_path, label=None).read(case).target.shape == (12, 10)


def test_loaded_samples(tmp_path: Path) -> None:
    write_images(tmp_path)
    dataset = images(tmp_path)
    labels, masks = dataset.load(Spec("class", ("images",), (8, 8))), dataset.load(Spec("mask", ("images",), (8, 8)))
    assert labels.class_names == ["benign", "malignant"] and masks.class_names == ["background", "lesion"]
    assert labels.preparation == ImagesPreparation(channels=3)
    for split, cases in dataset.cases(Problems()).items():
        one, other = labels.splits[split], masks.splits[split]
        assert one.names == [case.name for case in cases] and one.targets.tolist() == [case.label for case in cases]
        assert torch.equal(one.inputs[:], other.inputs[:]) and one.inputs.shape == (len(cases), 3, 8, 8)
        assert other.targets.shape == (len(cases), 8, 8) and other.targets.dtype == torch.uint8
        assert torch.equal(one.inputs[0], prepare(read_image(cases[0].path, 3), (8, 8)))


def test_all_problems_are_found_in_one_reading(tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "images" / "i00.png").unlink()
    (tmp_path / "masks" / "i01_mask.png").unlink()
    text = (tmp_path / "list.csv").read_text().replace("i02,l1,mel", "i02,l1,scc").replace("i03,l1", "i03,")
    (tmp_path / "list.csv").write_text(text + "i11,l5,mel,a\n")
    problems = Problems(keep=True)
    listing = images(tmp_path).cases(problems)
    assert sum(map(len, listing.values())) == 8
    for place, words in {
        "list.csv:2": "'i00' does not exist",
        "list.csv:3": "no mask",
        "list.csv:4": "'scc'",
        "list.csv:5": "'lesion' is empty",
        "list.csv:14": "another row, list.csv:13",
    }.items():
        assert len([text for text in problems.found if text.startswith(f"{place}: ") and words in text]) == 1
    assert len(problems.found) == 5


def test_the_table_may_be_tsv_or_parquet(tmp_path: Path) -> None:
    write_images(tmp_path)
    frame = pd.read_csv(tmp_path / "list.csv")
    frame.to_csv(tmp_path / "list.tsv", sep="\t", index=False)
    frame.to_parquet(tmp_path / "list.parquet")
    listings = []
    for file in ("list.csv", "list.tsv", "list.parquet"):
        table = {"file": file, "image": "id", "where": {"site": ["a"], "dx": ["nv", "mel"]}}
        cases = images(tmp_path, table=table).cases(Problems())
        listings.append({split: [case.name for case in some] for split, some in cases.items()})
    assert listings[0] == listings[1] == listings[2]
    expected = frame[(frame["site"] == "a") & frame["dx"].isin(["nv", "mel"])]["id"].tolist()
    assert sorted(name.split("/")[-1] for some in listings[0].values() for name in some) == [
        f"{n}.png" for n in expected
    ]


def test_the_documented_site_files_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "site-files.md").read_text()
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "datasets:" in block]
    kinds = set()
    for block in blocks:
        (tmp_path / "site.yaml").write_text(block)
        kinds |= {dataset.kind for dataset in load_site_file(tmp_path / "site.yaml").datasets.values()}
    assert kinds == {"volumes", "table", "images", "arrays", "series"}
