# SPDX-License-Identifier: Apache-2.0
"""Three retina collections as they are downloaded (their names, formats and folders; made-up pictures): what
``site init`` proposes can be used as it is, masks are found, and both eyes of a patient stay in one split."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medpfl.check.check import check_data
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.contract import Case
from medpfl.data.declared import Problems
from medpfl.data.images.declare import ImageCase
from medpfl.data.init.answers import Answers
from medpfl.data.init.pairing import eyes
from medpfl.data.init.write import write_site_file
from medpfl.data.pixels import read_image
from medpfl.data.site_file import load_site_file


def photograph(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (24, 28, 3), dtype=np.uint8)).save(path)


def vessels(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = (np.random.default_rng(seed).random((24, 28)) > 0.8).astype(np.uint8) * 255
    Image.fromarray(values).save(path)


def chase(folder: Path) -> None:
    """Image_01L.jpg and Image_01L_1stHO.png in one folder: both eyes of each child."""
    for number in range(1, 11):
        for eye in "LR":
            photograph(folder / f"Image_{number:02d}{eye}.jpg", number)
            vessels(folder / f"Image_{number:02d}{eye}_1stHO.png", number + 50 * (eye == "R"))


def drive(folder: Path) -> None:
    """images/21_training.tif and 1st_manual/21_manual1.gif."""
    for number in range(21, 41):
        photograph(folder / "images" / f"{number}_training.tif", number)
        vessels(folder / "1st_manual" / f"{number}_manual1.gif", number)


def stare(folder: Path) -> None:
    """stare-images/im0001.ppm and labels-ah/im0001.ah.ppm."""
    for number in range(1, 21):
        photograph(folder / "stare-images" / f"im{number:04d}.ppm", number)
        vessels(folder / "labels-ah" / f"im{number:04d}.ah.ppm", number)


def listing(site_file: Path) -> dict[str, Sequence[Case]]:
    return dict(load_site_file(site_file).datasets["vessels"].cases(Problems()))


def proposed(folder: Path) -> Path:
    answers = Answers({"site": "here", "dataset": "vessels"}, {}, None)
    return write_site_file(folder, folder.parent / "site.yaml", answers)[0]


@pytest.mark.parametrize(("collection", "count"), [(chase, 20), (drive, 20), (stare, 20)])
def test_a_collection_can_be_used_as_it_was_downloaded(
    tmp_path: Path, collection: Callable[[Path], None], count: int
) -> None:
    collection(tmp_path / "data")
    site_file = proposed(tmp_path / "data")
    report = check_data(site_file, None, None, lambda what, done, all_: None)
    assert not report.problems, report.problems
    assert sum(len(cases) for cases in listing(site_file).values()) == count


def test_both_eyes_of_a_patient_stay_in_one_split(tmp_path: Path) -> None:
    chase(tmp_path / "data")
    splits = listing(proposed(tmp_path / "data"))
    groups = {split: {case.group for case in cases} for split, cases in splits.items()}
    assert groups["train"] | groups["validation"] | groups["test"] == {f"{number:02d}" for number in range(1, 11)}
    assert not groups["train"] & groups["test"] and not groups["train"] & groups["validation"]


def test_where_several_files_could_be_the_masks_one_is_named(tmp_path: Path) -> None:
    """As in CHASE, with two readers, and in DRIVE, whose folder "mask" holds the field of view."""
    drive(tmp_path / "data")
    for number in range(21, 41):
        vessels(tmp_path / "data" / "mask" / f"{number}_training_mask.gif", number)
    options = r"1st_manual/\{case\}_manual1\.gif, mask/\{case\}_training_mask\.gif"
    with pytest.raises(SiteFileError, match=f"--masks is needed: Which files are the masks.*{options}"):
        proposed(tmp_path / "data")
    chosen = Answers({"site": "here", "dataset": "vessels", "masks": "1st_manual/{case}_manual1.gif"}, {}, None)
    write_site_file(tmp_path / "data", tmp_path / "site.yaml", chosen)
    cases = [case for cases in listing(tmp_path / "site.yaml").values() for case in cases]
    assert {case.mask.parent.name for case in cases if isinstance(case, ImageCase) and case.mask} == {"1st_manual"}


def test_a_missing_mask_is_named_by_what_the_braces_hold(tmp_path: Path) -> None:
    drive(tmp_path / "data")
    site_file = proposed(tmp_path / "data")
    (tmp_path / "data" / "1st_manual" / "30_manual1.gif").unlink()
    with pytest.raises(DataError, match=r"30_training\.tif has no mask; expected one case 30 among data/1st_manual"):
        listing(site_file)


@pytest.mark.parametrize("suffix", ["tif", "ppm", "gif", "webp", "pgm", "bmp"])
def test_lossless_formats_hold_what_png_holds(tmp_path: Path, suffix: str) -> None:
    values = np.random.default_rng(0).integers(0, 255, (6, 8), dtype=np.uint8)
    options = {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(values).save(tmp_path / f"a.{suffix}", **options)
    assert (read_image(tmp_path / f"a.{suffix}", 1)[0] == values).all()


def test_several_pictures_in_one_file_are_refused(tmp_path: Path) -> None:
    pages = [Image.fromarray(np.full((6, 8), value, np.uint8)) for value in (1, 2, 3)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match=r"a\.tif: expected one picture, got 3 in one file"):
        read_image(tmp_path / "a.tif", 1)
    Image.fromarray(np.zeros((6, 8), np.float32)).save(tmp_path / "b.tif")
    with pytest.raises(DataError, match=r"b\.tif: expected whole numbers of 8 or 16 bits, got fractions"):
        read_image(tmp_path / "b.tif", 1)


@pytest.mark.parametrize(
    ("stems", "pattern"),
    [
        (["p1_OD", "p1_OS", "p2_OD"], "p{patient}_O[DS]"),
        (["01L", "01R"], "{patient}[LR]"),
        (["01L", "02R"], None),  # one eye each
        (["01L", "01R", "02"], None),
        (["1L", "1_R"], None),
    ],
)
def test_eyes(stems: list[str], pattern: str | None) -> None:
    assert eyes(stems) == pattern
