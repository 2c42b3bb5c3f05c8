# SPDX-License-Identifier: Apache-2.0
"""The data check on real files: what it counts, what it finds, what it shows, and whether a job could run."""

import base64
import io
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from hospitals import AFFINE, SHAPE, change_json, change_yaml, save, scan, write_table, write_volumes
from medpfl.check.check import Report, check_data
from medpfl.check.findings import _codes
from medpfl.check.inspection import Inspection
from medpfl.check.pictures import picture_of
from medpfl.cli import app
from medpfl.data.contract import Item
from medpfl.job import Job
from medpfl.models.unet import UNet
from medpfl.tasks.contract import Task
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from tools import write_job

SMALL = Segmentation(dataset="organ", size=(8, 8), spacing=(2.0, 2.0, 4.0), architecture=UNet((4, 8)))


def check(path: Path, task: Task | None = None) -> Report:
    return check_data(path, None, ("the job", task) if task else None, lambda what, done, count: None)


def look(path: Path) -> Inspection:
    (inspection,) = check(path).inspections
    return inspection


def test_volumes_are_counted(tmp_path: Path) -> None:
    found = look(write_volumes(tmp_path))
    assert not found.problems and not found.warnings
    train = found.splits["train"]
    assert [counts.cases for counts in found.splits.values()] == [6, 5, 5]
    voxels = sum(int(scan(number)[1].sum()) for number in range(6))
    assert train.voxels == [6 * np.prod(SHAPE) - voxels, voxels] and train.classes == [6, 6]
    assert found.shapes == {(1, *SHAPE): 16} and found.spacings == {(2.0, 2.0, 4.0): 16}
    values = np.stack([scan(number)[0] for number in range(6)])
    channel = train.channels[0]
    assert (channel.low, channel.high) == (values.min(), values.max())
    assert channel.mean == pytest.approx(values.mean(dtype=np.float64)) and channel.missing == 0
    assert np.percentile(channel.sample(), 50) == pytest.approx(np.median(values), abs=3)
    assert len(found.pictures) == 6 + 5 + 5 and all(shown.picture.pixels is not None for shown in found.pictures)


def test_tables_are_counted_column_by_column(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    text = (tmp_path / "blood.csv").read_text().replace("p00,40,m", "p00,?,m")
    (tmp_path / "blood.csv").write_text(text)
    change_yaml(path, lambda site: site["datasets"]["blood"].update(missing_rows="drop"))
    found = look(path)
    age, sex, crp, sick, patient = found.columns
    assert (age.name, age.role, age.rows, age.missing) == ("age", "number", 40, 1)
    assert (age.numbers().min(), age.numbers().max()) == (41, 79)
    assert (sex.role, sex.texts) == ("categories", {"m": 20, "f": 20})
    assert (crp.role, sick.role, patient.role) == ("number", "label", "group")
    assert sum(sum(counts.classes) for counts in found.splits.values()) == 39
    assert found.splits["train"].groups == 12
    assert found.warnings == ["blood: 1 of 40 rows are not used, for a missing value or a problem"]


def test_the_same_image_in_two_splits_is_found_under_any_name(tmp_path: Path) -> None:
    path = write_volumes(tmp_path)
    for part in ("images", "labels"):  # p15 (test) becomes p00 (train)
        shutil.copy(tmp_path / part / "p00.nii.gz", tmp_path / part / "p15.nii.gz")
    found = look(path)
    assert len(found.problems) == 1
    for word in ("list.json: test[4]", "the same image as", "training[0]", "the train split", "the test split"):
        assert word in found.problems[0]
    assert not check(path).passed


def test_the_same_image_twice_in_a_split_is_a_warning(tmp_path: Path) -> None:
    path = write_volumes(tmp_path)
    save(tmp_path / "images" / "p01.nii.gz", scan(0)[0])
    found = look(path)
    assert not found.problems and len(found.warnings) == 1
    assert "the same image as" in found.warnings[0] and "with another label" in found.warnings[0]


def test_a_patient_in_two_splits_is_found(tmp_path: Path) -> None:
    path = write_volumes(tmp_path)
    change_json(tmp_path / "list.json", lambda lists: lists["test"][0].update(patient="p03"))
    (problem,) = look(path).problems
    for word in ("list.json: test[0]", "'p03'", "train split", "test split"):
        assert word in problem


def test_rows_of_a_patient_that_are_there_twice_are_a_warning(tmp_path: Path) -> None:
    """An export that was appended to itself: all rows of a patient stay in one split, and each counts twice."""
    path = write_table(tmp_path)
    assert not check(path).warnings
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    (tmp_path / "blood.csv").write_text("\n".join([*lines, *lines[1:]]) + "\n")
    report = check(path)
    assert report.passed and report.warnings == [
        "blood: 40 rows equal another row of the same group in all features and in what is to be predicted, the first "
        "blood.csv:42 and blood.csv:2; is a row there twice?"
    ]
    change = [*lines[:2], f"{lines[1][:-1]}{1 - int(lines[1][-1])}", *lines[2:]]  # another answer is another visit
    (tmp_path / "blood.csv").write_text("\n".join(change) + "\n")
    assert not check(path).warnings


def test_categories_that_differ_in_capital_letters_alone_are_a_warning(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    lines[1:9] = [line.replace(",m,", ",M,") for line in lines[1:9]]
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")
    values = ["m", "f", "M", "other", "Other"]
    change_yaml(path, lambda content: content["datasets"]["blood"]["features"].update(sex=values))
    assert [warning for warning in check(path).warnings if "capital" in warning] == [
        "column 'sex': 'M' and 'm' differ in capital letters alone; if they mean the same, list one of them under "
        "'features' and declare codes: {sex: {'M': 'm'}}"
    ]


def test_classes_that_differ_in_capital_letters_alone_are_a_warning(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    lines[1:] = [f"{line[:-1]}{('no', 'yes', 'Yes')[number % 3]}" for number, line in enumerate(lines[1:])]
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")

    def warned(**classes: list[str]) -> list[str]:
        change_yaml(path, lambda content: content["datasets"]["blood"]["label"].update(classes=classes))
        return [warning for warning in check(path).warnings if "capital" in warning]

    assert not warned(no=["no"], yes=["yes", "Yes"])
    assert warned(Yes=["Yes"], no=["no"], yes=["yes"]) == [
        "blood: the classes 'Yes' and 'yes' differ in capital letters alone; if they mean the same, make one class of "
        "them, with the values of both"
    ]


def test_groups_that_may_be_one_patient_or_nobody_are_a_warning(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    rows = [line.split(",", 1)[1] for line in lines[1:]]
    names = ["P1", "p1", "unknown", "unknown", "unknown", "NULL", *(f"Q{number}" for number in range(len(rows) - 6))]
    written = [f"{name},{row}" for name, row in zip(names, rows, strict=True)]
    (tmp_path / "blood.csv").write_text("\n".join([lines[0], *written]) + "\n")
    assert check(path).warnings == [
        "blood: the groups 'P1' and 'p1' differ in capital letters alone; if they are one patient, write the name "
        "alike everywhere, for that patient may be in training and in test",
        "blood: 3 cases are of the group 'unknown'; if it means that nobody knows whose they are, they count as one "
        "patient: leave them out, or give each a name of its own",
    ]


def test_equal_rows_of_two_splits_are_a_warning(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    lines[1:] = [",".join([line.split(",")[0], "50", "m", "1", line[-1]]) for line in lines[1:]]
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")
    report = check(path)
    assert report.passed
    assert any("rows equal a row of another split in all features" in warning for warning in report.warnings)
    assert "column 'age': every row has the value 50" in report.warnings


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda f: save(f / "images/p02.nii.gz", np.full(SHAPE, 7, np.float32)), ["1 images hold one value", "p02"]),
        (
            lambda f: save(f / "labels/p02.nii.gz", np.zeros(SHAPE, np.uint8)),
            ["1 of 6 label maps of the train split hold nothing but 'background'", "p02"],
        ),
        (
            lambda f: [save(f / f"labels/p0{n}.nii.gz", np.zeros(SHAPE, np.uint8)) for n in range(6)],
            ["no case of the train split has 'organ'"],
        ),
        (
            lambda f: [
                save(f / p / "p02.nii.gz", v, np.diag([2, 2, 20.0, 1]))
                for p, v in zip(("images", "labels"), scan(2), strict=True)
            ],
            ["1 volumes have voxels of 2 x 2 x 20 mm"],
        ),
        (
            lambda f: change_json(f / "list.json", lambda lists: lists.update(validation=[])),
            ["there is no validation split"],
        ),
    ],
)  # fmt: skip
def test_what_is_worth_a_look(tmp_path: Path, break_it: Callable[[Path], object], words: list[str]) -> None:
    path = write_volumes(tmp_path)
    break_it(tmp_path)
    report = check(path)
    assert report.passed
    for word in words:
        assert any(word in warning for warning in report.warnings), report.warnings


def test_a_rare_class_is_told(tmp_path: Path) -> None:
    path = write_table(tmp_path, rows=200)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    lines[1:] = [line[:-1] + str(int(number % 60 == 0)) for number, line in enumerate(lines[1:])]
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")
    assert any("'ill' is rare: " in warning for warning in look(path).warnings)


@pytest.mark.parametrize("code", ["9999999", "99999.99", "-9"])
def test_a_suspected_code_is_named_as_missing_has_to_name_it(tmp_path: Path, code: str) -> None:
    """Of 9999999 "1e+07" was told and of 99999.99 "100000", and both stay in the data where these are listed."""
    path = write_table(tmp_path, rows=200)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    for number in range(1, 6):
        patient, age, sex, _, sick = lines[number].split(",")
        lines[number] = ",".join((patient, age, sex, code, sick))
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")
    assert any(f"5 rows have the value {code}, far from all others" in warning for warning in look(path).warnings)


def test_codes_for_not_known_are_suspected() -> None:
    rng = np.random.default_rng(0)
    pressure = np.round(rng.normal(130, 15, 300))
    assert list(_codes(pressure)) == []
    assert list(_codes(np.append(pressure, [-9.0] * 5))) == [(-9.0, 5, "far from all others")]
    assert list(_codes(np.append(pressure, [999.0] * 3))) == [(999.0, 3, "far from all others")]
    assert list(_codes(np.append(pressure, [999.0]))) == []  # one outlier is no code
    assert list(_codes(rng.integers(0, 2, 300).astype(float))) == []
    crp = np.round(rng.gamma(1, 20, 300), 1)  # mg/l: many are small, so that -9 is not far from them
    assert list(_codes(crp)) == []
    assert list(_codes(np.append(crp, [-9.0] * 5))) == [(-9.0, 5, "the only negative one")]
    assert list(_codes(np.append(crp, [-9.0] * 2))) == []
    assert list(_codes(np.append(crp, [-0.5] * 5))) == []  # no code
    assert list(_codes(np.append(crp, [-9.0] * 5 + [-2.0]))) == []  # such values may be below zero


def test_every_problem_is_told_not_only_the_first(tmp_path: Path) -> None:
    path = write_volumes(tmp_path)
    (tmp_path / "images" / "p01.nii.gz").unlink()
    save(tmp_path / "labels" / "p07.nii.gz", np.full(SHAPE, 9, np.uint8))
    (tmp_path / "images" / "p12.nii.gz").write_bytes(b"no image")
    report = check(path, SMALL)
    assert len(report.problems) == 3
    for name, problem in zip(("p01", "p07", "p12"), report.problems, strict=True):
        assert name in problem and "list.json: " in problem
    assert report.trial is not None and "p01.nii.gz: no such file" in report.trial.failure
    assert report.inspections[0].splits["train"].cases == 5  # the others are still counted


@pytest.mark.slow
def test_a_job_that_can_run(tmp_path: Path) -> None:
    report = check(write_volumes(tmp_path), SMALL)
    assert report.passed and report.verdict == "The job the job can run here: no problem in the data."
    trial = report.trial
    assert trial is not None and trial.samples == {"train": 36, "validation": 30, "test": 30}
    assert trial.shape == (1, 8, 8) and trial.parameters > 0
    assert (trial.memory, trial.scratch) == (96 * 64 * (4 + 1), 0)


@pytest.mark.slow
def test_memory_and_scratch_are_told_apart(tmp_path: Path) -> None:
    path = write_volumes(tmp_path)
    change_yaml(path, lambda site: site.update(storage={"memory_gb": 1e-6}))
    trial = check(path, SMALL).trial
    assert trial is not None and trial.memory + trial.scratch == 96 * 64 * (4 + 1) and trial.scratch > 0


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Tabular(dataset="heart"), "which this hospital does not declare"),
        (Tabular(dataset="organ"), "is of kind 'volumes', the job's task needs 'table'"),
    ],
)
def test_a_job_that_cannot_run(tmp_path: Path, task: Task, words: str) -> None:
    report = check(write_volumes(tmp_path), task)
    assert (
        not report.passed and words in report.verdict and report.verdict.startswith("The job the job cannot run here")
    )


def test_a_job_is_not_tried_on_rows_that_were_left_out(tmp_path: Path) -> None:
    """Inspecting leaves bad rows out; the job itself would refuse them."""
    path = write_table(tmp_path)
    (tmp_path / "blood.csv").write_text((tmp_path / "blood.csv").read_text().replace("p00,40,m", "p00,old,m"))
    trial = check(path, Tabular(dataset="blood")).trial
    assert trial is not None and "expected a number, got 'old'" in trial.failure


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check-data", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_the_command_and_its_page(tmp_path: Path, make_job: Callable[..., Job]) -> None:
    site = write_table(tmp_path / "data")
    job = write_job(make_job(), tmp_path / "job")
    code, output = invoke(str(site), "--job", str(job))
    assert code == 0 and "The job small can run here" in " ".join(output.split())
    page = tmp_path / "data" / "site.check.html"
    text = page.read_text()
    assert "The job small can run here" in text and "patient_id" in text
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", text) and "http" not in text  # nothing is loaded
    assert not [path for path in page.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_folder_with_a_site_name(tmp_path: Path) -> None:
    write_table(tmp_path).rename(tmp_path / "here.yaml")
    assert invoke(str(tmp_path), "--site", "here", "--page", str(tmp_path / "p.html"))[0] == 0
    assert (tmp_path / "p.html").exists()


def test_many_problems_are_counted_on_the_terminal_and_listed_on_the_page(tmp_path: Path) -> None:
    path = write_table(tmp_path, rows=120)
    text = re.sub(r",m,", ",x,", (tmp_path / "blood.csv").read_text())
    (tmp_path / "blood.csv").write_text(text)
    code, output = invoke(str(path))
    assert code == 1 and "Problems: 1\n" in output and "; 59 more like it: blood.csv:4, blood.csv:6" in output
    page = (tmp_path / "site.check.html").read_text()
    assert all(f"blood.csv:{line}: column" in page for line in range(2, 122, 2))


def test_names_from_files_are_text_on_the_page(tmp_path: Path) -> None:
    path = write_volumes(tmp_path)
    change_yaml(path, lambda site: site["datasets"]["organ"]["labels"].update({1: "<script>alert(1)</script>"}))
    assert invoke(str(path))[0] == 0
    page = (tmp_path / "site.check.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


def test_the_page_cannot_be_written(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    result = CliRunner().invoke(app, ["check-data", str(path), "--page", str(tmp_path / "no" / "p.html")])
    assert "cannot write the page" in str(result.exception) and "--page" in str(result.exception)


def test_an_oblique_volume_is_drawn_upright(tmp_path: Path) -> None:
    """The picture shows the patient's right on the left, the front above, whatever the file's axes are."""
    label = np.zeros((20, 20, 6), np.uint8)
    label[15:18, 14:17, 3] = 1  # to the right (RAS: first axis grows to the right), to the front
    image = np.where(label > 0, 200, 10).astype(np.float32)
    pictures = []
    for axes in ("RAS", "LPS", "PIR"):
        folder = tmp_path / axes
        path = write_volumes(folder, (1, 0, 1))
        for part, values in (("images", image), ("labels", label)):
            stored = nib.Nifti1Image(values, AFFINE)
            turn = nib.orientations.ornt_transform(
                nib.orientations.io_orientation(AFFINE), nib.orientations.axcodes2ornt(axes)
            )
            nib.save(stored.as_reoriented(turn), folder / part / "p00.nii.gz")
        shown = next(shown for shown in look(path).pictures if shown.split == "train")
        pictures.append(np.array(Image.open(io.BytesIO(base64.b64decode(shown.picture.png())))))
    assert np.array_equal(pictures[0], pictures[1]) and np.array_equal(pictures[0], pictures[2])
    rows, columns = np.nonzero(pictures[0][..., 0].astype(int) - pictures[0][..., 2] > 100)  # the red outline
    height, width = pictures[0].shape[:2]
    assert rows.mean() < 0.4 * height and columns.mean() < 0.4 * width
    inside = pictures[0][round(rows.mean()), round(columns.mean())]
    assert inside.min() > 200 and pictures[0][-round(rows.mean()), -round(columns.mean())].max() < 50


def test_three_channels_of_a_volume_are_no_colours() -> None:
    """T2, diffusion and ADC of a prostate, say, whose values are in the hundreds: the picture was white all over."""
    rng = np.random.default_rng(0)
    image = rng.normal(900, 200, (3, 12, 10, 4)).astype(np.float32)
    label = (rng.random((12, 10, 4)) < 0.2).astype(np.uint8)
    three, one = (picture_of(Item(channels, label, AFFINE)) for channels in (image, image[:1]))
    assert three is not None and one is not None and three.pixels is not None and one.pixels is not None
    assert np.array_equal(three.pixels, one.pixels) and one.pixels.std() > 20


def test_a_split_of_one_patient_is_told_before_a_job_is_refused(tmp_path: Path) -> None:
    """The first that was heard of it was that the hospital had not taken part."""
    path = write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    parts = ["part", *["validation"] * 2, *["test"] * 8, *["train"] * 30]
    (tmp_path / "blood.csv").write_text("".join(f"{line},{part}\n" for line, part in zip(lines, parts, strict=True)))
    change_yaml(
        path, lambda content: content["datasets"]["blood"].update(split={"column": "part", "group": "patient_id"})
    )
    (told,) = [warning for warning in look(path).warnings if "least_scored" in warning]
    assert told.startswith("blood: the validation split is of 1 patient or recording, and this hospital's policy")
    change_yaml(path, lambda content: content.update(policy={"least_scored": 1}))
    assert not any("least_scored" in warning for warning in look(path).warnings)
    change_yaml(path, lambda content: content.update(policy={"least_scored": 5}))
    assert [warning[:25] for warning in look(path).warnings if "least_scored" in warning] == [
        "blood: the validation spl", "blood: the test split is ",
    ]  # fmt: skip
