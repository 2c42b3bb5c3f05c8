# SPDX-License-Identifier: Apache-2.0
"""A datalist's lists: cases under a name that nobody reads would vanish without a word."""

import json
from pathlib import Path
from typing import Any

import pytest

from medpfl.core.errors import DataError
from medpfl.data.declared import LabelColumn, Problems, SplitRule
from medpfl.data.init.answers import Answers
from medpfl.data.init.volumes import from_datalist
from medpfl.data.volumes.declare import Volumes

ORGAN = {"labels": {0: "background", 1: "organ"}}
CLASSED = {"label": LabelColumn(column="sick", classes={"no": [0], "yes": [1]})}


def item(name: str, **others: Any) -> dict[str, Any]:
    return {"image": f"{name}.nii.gz", "label": f"{name}_seg.nii.gz", "sick": 1} | others


def declare(folder: Path, content: dict[str, Any], **target: Any) -> Volumes:
    (folder / "list.json").write_text(json.dumps({"training": [item(name) for name in "abcdef"]} | content))
    dataset = Volumes(kind="volumes", datalist="list.json", **target)
    dataset._folder = folder
    return dataset


@pytest.mark.parametrize("target", [ORGAN, CLASSED, ORGAN | CLASSED])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("val", "; did you mean 'validation'?"),
        ("valid", "; did you mean 'validation'?"),
        ("train", "; did you mean 'training'?"),
        ("tests", "; did you mean 'test'?"),
        ("Test", "; did you mean 'test'?"),
        ("external", ""),
    ],
)
def test_cases_in_a_list_that_is_not_read_are_refused(
    tmp_path: Path, name: str, meant: str, target: dict[str, Any]
) -> None:
    dataset = declare(tmp_path, {name: [{"image": "u.nii.gz", "label": 3}, item("x"), item("y")]}, **target)
    problems = Problems(keep=True)
    dataset.cases(problems)
    assert len(problems.found) == 1
    assert problems.found[0].endswith(
        f"list.json: the list '{name}' holds cases and is not read, unlike 'training', 'validation', 'test' and "
        f"'testing'; rename it, or leave it out{meant}"
    )
    with pytest.raises(DataError, match=f"the list '{name}' holds cases and is not read"):
        dataset.cases(Problems())


@pytest.mark.parametrize("target", [ORGAN, CLASSED])
def test_what_else_a_datalist_says_is_its_own_affair(tmp_path: Path, target: dict[str, Any]) -> None:
    others = {
        "name": "organ",
        "description": "",
        "labels": {"0": "background", "1": "organ"},
        "modality": {"0": "CT"},
        "numTraining": 6,
        "regions_class_order": [1, 2],
        "references": ["a paper", {"image": "of the organ"}],
        "unlabelled": [{"image": "u.nii.gz"}],
        "extra": ["v.nii.gz"],
        "val": [],
    }
    assert sum(map(len, declare(tmp_path, others, **target).cases(Problems()).values())) == 6


@pytest.mark.parametrize("target", [ORGAN, CLASSED])
@pytest.mark.parametrize("key", ["validation", "test", "testing"])
def test_a_case_whose_label_stands_under_a_misspelt_key_is_refused(
    tmp_path: Path, key: str, target: dict[str, Any]
) -> None:
    field = "label" if target is ORGAN else "sick"
    odd = {f"{name}s" if name == field else name: value for name, value in item("u").items()}
    for items in ([item("v"), odd], [{"image": "w.nii.gz"}, odd]):  # of a list that is misspelt throughout, each is
        others = {"validation": [item("x")], "test": [item("y")]}
        problems = Problems(keep=True)
        declare(tmp_path, others | {key: items}, **target).cases(problems)
        assert problems.found[0] == (
            f"{tmp_path}/list.json: {key}[1]: it has no '{field}', without which a case is left out; did you mean "
            f"'{field}s'?"
        )


@pytest.mark.parametrize("odd", [{}, {"label": "a_seg.nii.gz"}])
def test_an_item_without_an_image_is_refused_in_every_list(tmp_path: Path, odd: dict[str, Any]) -> None:
    content = {"validation": [item("x")], "test": [item("y"), odd]}
    with pytest.raises(DataError, match=r"test\[1\]: expected {'image': file, 'label': file}, got {"):
        declare(tmp_path, content, **ORGAN).cases(Problems())


def test_images_without_a_label_are_left_out(tmp_path: Path) -> None:
    """The Decathlon's own: ``test`` of images alone, beside labelled cases in ``testing``. A key that other cases have,
    too, is no misspelt one."""
    cases = [item(name, page=3) for name in "xyz"]
    unlabelled = ["a_test.nii.gz", {"image": "b_test.nii.gz", "page": 40}]
    content = {"test": unlabelled, "testing": [cases[0], {"image": "c.nii.gz"}], "validation": cases[1:]}
    for target in (ORGAN, {"label": LabelColumn(column="stage", classes={"no": [0], "yes": [1]})}):
        staged = {
            key: [{**one, "stage": 1} if "label" in one else one for one in some] for key, some in content.items()
        }
        training = [item(name, stage=1) for name in "abcdef"]
        listing = declare(tmp_path, {**staged, "training": training}, **target).cases(Problems())
        assert [case.name for case in listing["test"]] == ["x"] and len(listing["train"]) == 6


def scans(*fields: str, **others: Any) -> dict[str, Any]:
    """Two scans of each of twelve patients, whose names stand in ``fields``, one field after another."""
    names = [f"{letter}{scan}" for scan in range(2) for letter in "lkjihgfedcba"]
    return {"training": [item(name, **{fields[n % len(fields)]: name[0]}, **others) for n, name in enumerate(names)]}


@pytest.mark.parametrize("rule", [{"seed": 1}, {"fractions": {"train": 0.5, "validation": 0.25, "test": 0.25}}, {}])
def test_scans_of_a_patient_stay_together_whatever_else_the_split_says(tmp_path: Path, rule: dict[str, Any]) -> None:
    listing = declare(tmp_path, scans("patient"), **ORGAN, split=SplitRule(**rule)).cases(Problems())
    patients = [{case.name[0] for case in cases} for cases in listing.values()]
    assert sum(map(len, patients)) == 12
    alone = declare(tmp_path, scans("patient"), **ORGAN, split=SplitRule(**rule, group=None)).cases(Problems())
    assert len({case.group for cases in alone.values() for case in cases}) == 24


@pytest.mark.parametrize("fields", [("patient_id",), ("PatientID",), ("subject",), ("patient", "patient_id")])
def test_patients_in_another_field_than_the_usual_one_are_asked_for(tmp_path: Path, fields: tuple[str, ...]) -> None:
    """Each scan would be a patient of its own."""
    with pytest.raises(
        DataError, match=rf"'{fields[-1]}' says whose its items are, .* 'split: {{group: {fields[-1]}}}'"
    ):
        declare(tmp_path, scans(*fields), **ORGAN).cases(Problems())
    declare(tmp_path, scans(*fields), **ORGAN, split=SplitRule(group=None)).cases(Problems())
    declare(tmp_path, scans("id"), **ORGAN).cases(Problems())  # a number of the item, in every list from 0
    alone = {"training": [item(name, subject=name) for name in "abcdef"]}
    declare(tmp_path, alone, **ORGAN).cases(Problems())


def test_patients_of_several_volumes_are_not_cut_class_by_class(tmp_path: Path) -> None:
    dataset = declare(tmp_path, scans("patient"), **CLASSED, split=SplitRule(stratify=True))
    with pytest.raises(DataError, match="'stratify' cuts volume by volume, and 'l' has several; leave it out"):
        dataset.cases(Problems())


def test_classes_stay_in_proportion_in_whatever_order_the_list_is(tmp_path: Path) -> None:
    training = [item(f"{(number * 7) % 40:02}", sick=int(number >= 30)) for number in range(40)]
    listing = declare(tmp_path, {"training": training}, **CLASSED, split=SplitRule(stratify=True)).cases(Problems())
    assert {split: sum(case.value for case in cases) for split, cases in listing.items()} == {  # type: ignore[attr-defined]
        "train": 6, "validation": 2, "test": 2,
    }  # fmt: skip


def test_site_init_proposes_the_field_that_says_whose_the_scans_are(tmp_path: Path) -> None:
    names = ["background", "organ"]
    for field, labels in (("subject", dict(enumerate(names))), ("patient", dict(enumerate(names)))):
        (tmp_path / "list.json").write_text(json.dumps({"labels": labels} | scans(field)))
        entries = from_datalist(tmp_path / "list.json", "list.json", Answers({}))
        assert entries[-1].key == "split" and entries[-1].value["group"] == field
        assert entries[-1].comment == "scans of one patient stay together"
