# SPDX-License-Identifier: Apache-2.0
"""Whatever the data say of patients and of splits stands in the site file that ``medpfl site init`` proposes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from hospitals import save, scan
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.declared import Problems
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file

PATIENTS = [f"p{number // 3}" for number in range(36)]
PARTS = [("train", "val", "test", "train")[number // 3 % 4] for number in range(36)]


def split_of(place: Path, **flags: str) -> dict[str, Any]:
    output = place.parent / "site.yaml"
    write_site_file(place, output, Answers({"site": "here", "dataset": "data", **flags}))
    found: dict[str, Any] = yaml.safe_load(output.read_text())["datasets"]["data"]["split"]
    return found


def groups(place: Path) -> dict[str, set[str]]:
    """Of each split whose cases it has."""
    listing = load_site_file(place.parent / "site.yaml", "here").datasets["data"].cases(Problems())
    return {split: {case.group for case in cases} for split, cases in listing.items()}


def image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)).save(path)


def mask(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.eye(8, dtype=np.uint8)).save(path)


def table(path: Path, **more: list[str]) -> None:
    rows = range(36)
    pd.DataFrame({"age": rows, "sick": [row % 2 for row in rows], **more}).to_csv(path, index=False)


def test_the_column_of_splits_beside_that_of_patients(tmp_path: Path) -> None:
    """Every row counted as another patient, and nobody looked whether a patient is in two splits."""
    table(tmp_path / "t.csv", patient=PATIENTS, split=PARTS)
    assert split_of(tmp_path / "t.csv", label="sick") == {"column": "split", "group": "patient"}
    assert groups(tmp_path / "t.csv")["test"] == {"p2", "p6", "p10"}


def test_a_column_of_splits_by_what_it_says(tmp_path: Path) -> None:
    """It was a feature, and the rows were cut anew: cases of the test part were trained on."""
    table(tmp_path / "t.csv", phase=PARTS)
    assert split_of(tmp_path / "t.csv", label="sick") == {"column": "phase"}


@pytest.mark.parametrize("flags", [{}, {"label": "y"}])
def test_arrays_that_say_whose_an_image_is_and_in_which_split(tmp_path: Path, flags: dict[str, str]) -> None:
    images, labels = np.zeros((36, 8, 8), np.uint8), np.arange(36) % 2
    np.savez(tmp_path / "a.npz", x=images, y=labels, patient=PATIENTS)
    assert split_of(tmp_path / "a.npz", **flags)["group"] == "patient"
    found = groups(tmp_path / "a.npz")
    assert len(set.union(*found.values())) == 12 and sum(map(len, found.values())) == 12
    (tmp_path / "site.yaml").unlink()
    np.savez(tmp_path / "a.npz", x=images, y=labels, patient=PATIENTS, part=PARTS)
    assert split_of(tmp_path / "a.npz", **flags) == {"column": "part", "group": "patient"}
    (tmp_path / "site.yaml").unlink()
    np.savez(tmp_path / "a.npz", x=images, y=labels, lesion=PATIENTS)
    assert split_of(tmp_path / "a.npz", label="y", group="lesion")["group"] == "lesion"  # which was left out


def test_masks_whose_table_says_whose_they_are(tmp_path: Path) -> None:
    """The table beside them was not looked at."""
    for number in range(36):
        image(tmp_path / "d" / "images" / f"i{number}_x.png", number)
        mask(tmp_path / "d" / "masks" / f"i{number}_x.png")
    names = [f"i{number}_x.png" for number in range(36)]
    pd.DataFrame({"image": names, "patient": PATIENTS}).to_csv(tmp_path / "d" / "list.csv", index=False)
    assert split_of(tmp_path / "d")["group"] == "patient"
    found = groups(tmp_path / "d")
    assert len(set.union(*found.values())) == 12 and sum(map(len, found.values())) == 12
    (tmp_path / "site.yaml").unlink()
    pd.DataFrame({"image": names, "lesion": PATIENTS, "set": PARTS}).to_csv(tmp_path / "d" / "list.csv", index=False)
    assert split_of(tmp_path / "d", group="lesion") == {"column": "set", "group": "lesion"}
    assert len(groups(tmp_path / "d")["test"]) == 3
    (tmp_path / "site.yaml").unlink()
    pd.DataFrame({"image": names, "patient": PATIENTS})[:30].to_csv(tmp_path / "d" / "list.csv", index=False)
    split_of(tmp_path / "d")
    assert "# one row an image; not used, for lack of a row: 6\n" in (tmp_path / "site.yaml").read_text()


def test_a_list_of_names_beside_images_is_no_table(tmp_path: Path) -> None:
    """It was refused as a table without columns."""
    for number in range(12):
        image(tmp_path / "d" / ("ill", "well")[number % 2] / f"{number}.png", number)
    (tmp_path / "d" / "all.csv").write_text("".join(f"{number}.png\n" for number in range(12)))
    (tmp_path / "d" / "empty.csv").write_text("")
    assert split_of(tmp_path / "d")["stratify"]


@pytest.mark.parametrize(("inner", "flags"), [("", {}), ("", {"group": "folder"}), ("images/", {})])
def test_images_of_a_table_in_a_folder_for_each_patient(tmp_path: Path, inner: str, flags: dict[str, str]) -> None:
    names = [f"{inner}{patient}/{number}.png" for number, patient in enumerate(PATIENTS)]
    for number, name in enumerate(names):
        image(tmp_path / "d" / name, number)
    table(tmp_path / "d" / "list.csv", file=names)
    assert split_of(tmp_path / "d", label="sick", **flags)["group"] == "folder"
    found = groups(tmp_path / "d")
    assert set.union(*found.values()) == set(PATIENTS) and sum(map(len, found.values())) == 12


def test_images_of_a_table_in_folders_that_are_no_patients(tmp_path: Path) -> None:
    names = [f"{('well', 'ill')[number % 2]}/{number}.png" for number in range(36)]
    for number, name in enumerate(names):
        image(tmp_path / "d" / name, number)
    table(tmp_path / "d" / "list.csv", file=names)
    assert "group" not in split_of(tmp_path / "d", label="sick")
    (tmp_path / "site.yaml").unlink()
    table(tmp_path / "d" / "list.csv", file=names, who=PATIENTS)
    assert split_of(tmp_path / "d", label="sick", group="who")["group"] == "who"
    (tmp_path / "site.yaml").unlink()
    (tmp_path / "d" / "ill" / "deep").mkdir()
    (tmp_path / "d" / "ill" / "1.png").rename(tmp_path / "d" / "ill" / "deep" / "1.png")
    with pytest.raises(SiteFileError, match="--group: 'folder' is not there"):  # in folders of several depths
        split_of(tmp_path / "d", label="sick", group="folder")


def test_images_of_a_table_in_folders_of_splits(tmp_path: Path) -> None:
    """The folders were not looked at, and images of the folder test were trained on."""
    names = [f"{part}/{number}.png" for number, part in enumerate(PARTS)]
    for number, name in enumerate(names):
        image(tmp_path / "d" / name, number)
    table(tmp_path / "d" / "list.csv", file=names)
    assert split_of(tmp_path / "d", label="sick") == {"column": "split"}
    assert len(groups(tmp_path / "d")["test"]) == 9


def test_eyes_in_folders_of_splits(tmp_path: Path) -> None:
    for number in range(16):
        for eye in "LR":
            part, kind = ("train", "train", "val", "test")[number % 4], ("ill", "well")[number // 4 % 2]
            image(tmp_path / "d" / part / kind / f"{number:02}{eye}.png", number)
    assert split_of(tmp_path / "d") == {"column": "split", "group": "patient"}
    assert len(groups(tmp_path / "d")["test"]) == 4


def recording(path: Path, number: int, **columns: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = np.arange(20.0)
    frame = pd.DataFrame({"x": np.sin(steps + number), "act": ["lying", "walking"][number % 2], **columns})
    frame.to_csv(path, index=False)


def test_recordings_with_a_column_of_splits(tmp_path: Path) -> None:
    for number in range(36):
        recording(tmp_path / "d" / f"{number}.csv", number, patient=PATIENTS[number], split=PARTS[number])
    assert split_of(tmp_path / "d", label="act") == {"column": "split", "group": "patient"}
    assert groups(tmp_path / "d")["test"] == {"p2", "p6", "p10"}


def test_recordings_in_folders_of_splits(tmp_path: Path) -> None:
    """The folders were what is to be predicted, or patients of whom the one called test could be trained on."""
    for number in range(36):
        recording(tmp_path / "d" / PARTS[number] / f"{number}.csv", number)
    assert split_of(tmp_path / "d") == {"column": "folder"}
    assert len(groups(tmp_path / "d")["test"]) == 9


def test_folders_that_are_called_as_patients_are_no_classes(tmp_path: Path) -> None:
    """Each patient was a class to predict, whose cases were in training and in test."""
    for number in range(36):
        recording(tmp_path / "r" / PATIENTS[number] / f"{number}.csv", number)
        image(tmp_path / "i" / PATIENTS[number] / f"{number}.png", number)
    assert split_of(tmp_path / "r")["group"] == "folder"
    assert yaml.safe_load((tmp_path / "site.yaml").read_text())["datasets"]["data"]["label"]["column"] == "act"
    (tmp_path / "site.yaml").unlink()
    with pytest.raises(DataError, match=r"its folders are called as patients are \(p0, \.\.\.\) and so say no classes"):
        split_of(tmp_path / "i")


@pytest.mark.parametrize(
    "name", ["{kind}/{who}/{number}.png", "{who}/{kind}/{number}.png", "{part}/{kind}/{who}/{number}.png"]
)
def test_patients_folders_beside_those_of_classes(tmp_path: Path, name: str) -> None:
    """They were refused, as if there were no classes."""
    for number in range(36):
        kind = ("ill", "well")[number // 3 % 2]
        image(tmp_path / "d" / name.format(kind=kind, who=PATIENTS[number], part=PARTS[number], number=number), number)
    expected = {"column": "split", "group": "folder"} if "part" in name else "folder"
    found = split_of(tmp_path / "d")
    assert found == expected or found["group"] == expected
    parts = groups(tmp_path / "d")
    assert set.union(*parts.values()) == set(PATIENTS) and sum(map(len, parts.values())) == 12


def test_images_in_folders_of_splits_alone(tmp_path: Path) -> None:
    """The splits were the classes to predict."""
    for number in range(36):
        image(tmp_path / "d" / PARTS[number] / f"{number}.png", number)
    with pytest.raises(DataError, match=r"called as splits are \(test, \.\.\.\) and so say no classes"):
        split_of(tmp_path / "d")


def datalist(folder: Path, **others: Callable[[int], str]) -> Path:
    """Of 24 scans, with more fields."""
    items = []
    for number in range(24):
        picture, label = scan(number)
        save(folder / f"{number}.nii.gz", picture)
        save(folder / f"{number}_seg.nii.gz", label)
        said = {key: value(number) for key, value in others.items()}
        items.append({"image": f"{number}.nii.gz", "label": f"{number}_seg.nii.gz", **said})
    (folder / "list.json").write_text(json.dumps({"training": items}))
    return folder / "list.json"


def test_fields_of_a_datalist(tmp_path: Path) -> None:
    """A field of splits was not looked at, and --group was left out in silence."""
    place = datalist(tmp_path, patient=PATIENTS.__getitem__, split=PARTS.__getitem__, family=lambda n: f"f{n // 6}")
    assert split_of(place) == {"column": "split"}  # and the patient, as everywhere
    assert groups(place)["test"] == {"p2", "p6"}
    (tmp_path / "site.yaml").unlink()
    place = datalist(tmp_path, patient=PATIENTS.__getitem__, family=lambda n: f"f{n // 6}")
    assert split_of(place, group="family")["group"] == "family"
    assert sum(map(len, groups(place).values())) == 4
    (tmp_path / "site.yaml").unlink()
    assert split_of(place, group="none")["group"] is None
    assert sum(map(len, groups(place).values())) == 24


def test_another_field_of_patients_beside_lists_of_splits(tmp_path: Path) -> None:
    """The data check refused what was proposed."""
    content = json.loads(datalist(tmp_path, subject=PATIENTS.__getitem__).read_text())
    content = {"training": content["training"][:12], "test": content["training"][12:]}
    (tmp_path / "list.json").write_text(json.dumps(content))
    assert split_of(tmp_path / "list.json") == {"group": "subject"}
    assert groups(tmp_path / "list.json")["test"] == {"p4", "p5", "p6", "p7"}


def test_scans_that_lie_beside_the_patients_folders(tmp_path: Path) -> None:
    """One such scan, and every scan of every other patient was another patient."""
    for number in range(24):
        picture, label = scan(number)
        inner = f"{PATIENTS[number]}/" if number < 21 else ""
        save(tmp_path / "d" / f"{inner}s{number}.nii.gz", picture)
        save(tmp_path / "d" / f"{inner}s{number}_seg.nii.gz", label)
    split_of(tmp_path / "d")
    found = groups(tmp_path / "d")
    assert sum(map(len, found.values())) == 10 and set(PATIENTS[:21]) <= set.union(*found.values())


def bids(folder: Path, **columns: Callable[[int], str]) -> Path:
    rows = []
    for number in range(12):
        picture, _ = scan(number)
        save(folder / f"sub-{number:02}" / "anat" / f"sub-{number:02}_T1w.nii.gz", picture)
        rows.append({"participant_id": f"sub-{number:02}", **{key: value(number) for key, value in columns.items()}})
    pd.DataFrame(rows).to_csv(folder / "participants.tsv", sep="\t", index=False)
    return folder


def test_columns_of_participants(tmp_path: Path) -> None:
    parts = ("train", "train", "val", "test")
    place = bids(
        tmp_path / "d", dx=lambda n: "ab"[n % 2], split=lambda n: parts[n // 2 % 4], family=lambda n: f"f{n // 2}"
    )
    assert split_of(place, label="dx") == {"column": "split", "group": "patient"}
    (tmp_path / "site.yaml").unlink()
    (tmp_path / "site-data.json").unlink()
    assert split_of(place, label="dx", group="family") == {"column": "split", "group": "family"}
    assert groups(place)["test"] == {"f3"}


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    """It was left out in silence."""
    for number in range(12):
        image(tmp_path / "d" / ("ill", "well")[number % 2] / f"{number}.png", number)
        picture, label = scan(number)
        save(tmp_path / "v" / f"s{number}.nii.gz", picture)
        save(tmp_path / "v" / f"s{number}_seg.nii.gz", label)
    np.savez(tmp_path / "a.npz", x=np.zeros((12, 8, 8), np.uint8), y=np.arange(12) % 2)
    archive = {"images": np.zeros((12, 8, 8), np.uint8), "labels": np.arange(12)[:, None] % 2}
    parts = ("train", "val", "test")
    np.savez(tmp_path / "m.npz", **{f"{part}_{key}": one for part in parts for key, one in archive.items()})
    for place in ("d", "v", "a.npz", "m.npz"):
        with pytest.raises(SiteFileError, match=r"--group: 'who' is not there; expected one of: "):
            split_of(tmp_path / place, group="who")


def test_files_of_a_table_that_are_called_as_splits(tmp_path: Path) -> None:
    """Rows of test.csv were trained on without a word."""
    (tmp_path / "d").mkdir()
    for name in ("train", "test"):
        table(tmp_path / "d" / f"{name}.csv", patient=[f"{name}{row // 2}" for row in range(36)])
    assert split_of(tmp_path / "d", label="sick", kind="table")["group"] == "patient"
    text = (tmp_path / "site.yaml").read_text()
    assert "# rows of a group stay together; the files' rows are cut anew, whatever their names say" in text
