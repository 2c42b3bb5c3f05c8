# SPDX-License-Identifier: Apache-2.0
"""The hippocampus demo: the user's volumes, found as the Decathlon stores them, a hospital for each source."""

import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medpfl.core.errors import DataError
from medpfl.data.declared import Problems
from medpfl.data.site_file import load_site_file
from medpfl.data.volumes.declare import Volumes
from medpfl.demo.hippocampus import ENVIRONMENT_VARIABLE, write_hippocampus

SOURCES = {"eight_bit": (np.uint8, 200), "float": (np.float32, 3000), "large": (np.float32, 400_000)}


@pytest.fixture
def task04(tmp_path: Path) -> Path:
    """Ten small volumes of each source, as the Decathlon's archive unpacks."""
    folder = tmp_path / "Task04_Hippocampus"
    (folder / "imagesTr").mkdir(parents=True)
    (folder / "labelsTr").mkdir()
    rng = np.random.default_rng(0)
    for number in range(30):
        kind, brightest = list(SOURCES.values())[number % 3]
        image = (rng.random((5, 6, 4)) * brightest).astype(kind)
        image[0, 0, 0] = brightest
        name = f"hippocampus_{number:03d}.nii.gz"
        nib.save(nib.Nifti1Image(image, np.eye(4)), folder / "imagesTr" / name)
        nib.save(nib.Nifti1Image((image > brightest / 2).astype(np.uint8), np.eye(4)), folder / "labelsTr" / name)
    (folder / "imagesTr" / "._hippocampus_000.nii.gz").write_bytes(b"what macOS leaves in archives")
    return folder


def test_each_source_is_a_hospital_and_cases_stay_whole(task04: Path, tmp_path: Path) -> None:
    assert write_hippocampus(tmp_path / "out", task04) == list(SOURCES)
    names = set()
    for number, (site, (kind, _)) in enumerate(SOURCES.items()):
        dataset = load_site_file(tmp_path / "out" / f"{site}.yaml").datasets["hippocampus"]
        assert isinstance(dataset, Volumes) and dataset.names() == ["background", "anterior", "posterior"]
        listing = dataset.cases(Problems())
        assert {split: len(cases) for split, cases in listing.items()} == {"train": 5, "validation": 2, "test": 3}
        cases = [case for split in listing.values() for case in split]
        assert {int(case.name[-3:]) % 3 for case in cases} == {number}
        names |= {case.name for case in cases}
        assert np.asarray(nib.load(cases[0].images[0]).dataobj).dtype == kind  # type: ignore[attr-defined]
        assert dataset.read(cases[0]).image.shape == (1, 5, 6, 4)
    assert len(names) == 30


def test_an_archive_and_four_hospitals(task04: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in sorted(task04.rglob("hippo*.gz")):
            archive.write(path, f"{path.parent.name.removesuffix('Tr')}/{path.name}")
    found = write_hippocampus(tmp_path / "out", tmp_path / "all.zip", hospitals=4)
    assert found == ["float", "large", "eight_bit_1", "eight_bit_2"]  # of equal ones the first is divided
    assert len(list((tmp_path / "out" / "eight_bit_2" / "images").iterdir())) == 5


def test_data_that_are_not_there_are_asked_for(task04: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"not at .*none\. Download Task04_Hippocampus .* set MEDPFL_HIPPOCAMPUS"):
        write_hippocampus(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"imagesTr and labelsTr .*: no labels were found"):
        write_hippocampus(tmp_path / "out", tmp_path / "empty")
    (task04 / "imagesTr" / "hippocampus_004.nii.gz").unlink()
    with pytest.raises(DataError, match="the image of hippocampus_004 is missing"):
        write_hippocampus(tmp_path / "out", task04)
    (task04 / "imagesTr" / "hippocampus_004.nii.gz").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"hippocampus_004: cannot be read as a NIfTI volume"):
        write_hippocampus(tmp_path / "out", task04)
