# SPDX-License-Identifier: Apache-2.0
"""What the data check says of a job and a hospital's data together."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from hospitals import write_site, write_table, write_volumes
from medpfl.check.check import Report, check_data
from medpfl.models.lenet import LeNet5
from medpfl.models.unet import UNet
from medpfl.tasks.classification import Classification
from medpfl.tasks.contract import Task
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from pictures import TABLE, write_images

NET = UNet((4, 8))
pytestmark = pytest.mark.slow


def check(path: Path, task: Task) -> Report:
    return check_data(path, None, ("the job", task), lambda what, done, count: None)


def dot(folder: Path, number: int) -> None:
    """A case whose organ is one voxel."""
    file = folder / "labels" / f"p{number:02d}.nii.gz"
    image = nib.load(file)
    mask = np.zeros(image.shape, dtype=np.uint8)
    mask[1, 1, 1] = 1
    nib.save(nib.Nifti1Image(mask, image.affine), file)


def test_structures_that_a_jobs_size_loses(tmp_path: Path) -> None:
    path = write_volumes(tmp_path)
    for size, spacing in (((8, 8), (2.0, 2.0, 4.0)), ((8, 8, 4), (2.0, 2.0, 4.0))):
        task = Segmentation(dataset="organ", size=size, spacing=spacing, architecture=NET)
        assert not [told for told in check(path, task).warnings if "pixels of it" in told]
    for number in (0, 3, 7):
        dot(tmp_path, number)
    task = Segmentation(dataset="organ", size=(8, 8), spacing=(4.0, 4.0, 4.0), architecture=NET)
    report = check(path, task)
    assert report.passed and report.trial
    lost = "only 4 of them have at least 2 pixels of it; take a larger size or a smaller spacing"
    assert report.trial.warnings == [
        f"organ: {cases} cases of the {split} split hold 'organ', and at the job's size of 8 x 8 {lost}"
        for cases, split in ((6, "train"), (5, "validation"))
    ]


def test_volumes_that_fill_little_of_a_patch(tmp_path: Path) -> None:
    """One slice among whole volumes is read, trained on between zeros, and told."""
    path = write_volumes(tmp_path)
    for folder in ("images", "labels"):
        file = tmp_path / folder / "p03.nii.gz"
        image = nib.load(file)
        nib.save(nib.Nifti1Image(np.asanyarray(image.dataobj)[:, :, :1], image.affine), file)
    task = Segmentation(dataset="organ", size=(8, 8, 4), spacing=(2.0, 2.0, 4.0), architecture=NET)
    told = [told for told in check(path, task).warnings if "job's patch of" in told]
    assert len(told) == 1 and "cases of the " in told[0] and "p03" in told[0], told
    assert told[0].startswith("organ: 1 of ") and " x 1 at the job's spacing)" in told[0]


def test_few_cases_for_many_features(tmp_path: Path) -> None:
    few, many = (check(write_table(tmp_path / str(rows), rows), Tabular("blood")) for rows in (40, 400))
    (told,) = few.warnings
    assert (
        "training cases have '" in told and "there are 3 features" in told and "fewer than 10 a feature are few" in told
    )
    assert not many.warnings
    assert few.passed


def test_an_answer_that_looks_good_whatever_the_case(tmp_path: Path) -> None:
    write_images(tmp_path, count=80)
    rows = (tmp_path / "list.csv").read_text().replace(",mel,", ",bkl,").splitlines()
    rows[4::40] = [row.replace(",bkl,", ",mel,").replace(",nv,", ",mel,") for row in rows[4::40]]
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    path = write_site(tmp_path, {"skin": {key: value for key, value in TABLE.items() if key != "masks"}})
    for score, warned in (("accuracy", True), ("balanced_accuracy", False)):
        task = Classification("skin", size=(32, 32), architecture=LeNet5(), score=score)
        found = [told for told in check(path, task).warnings if "whatever the case" in told]
        assert bool(found) is warned, found


def test_networks_far_from_the_datas_size(tmp_path: Path) -> None:
    task = Segmentation(dataset="organ", size=(16, 16), spacing=(2.0, 2.0, 4.0), architecture=UNet((128, 256, 512)))
    told = check(write_volumes(tmp_path), task).warnings
    assert len(told) == 1 and "weights for 6 training cases, more than 100,000 a case" in told[0]
