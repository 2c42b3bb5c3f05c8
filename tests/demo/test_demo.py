# SPDX-License-Identifier: Apache-2.0
"""The demo hospitals: phantoms that are what they claim, and the heart data as FLamby cuts them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medpfl.core.errors import DataError
from medpfl.data.declared import Problems
from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table, read_table
from medpfl.data.volumes.declare import Volumes
from medpfl.demo import phantom
from medpfl.demo.heart import ENVIRONMENT_VARIABLE, write_heart
from medpfl.demo.heart import HOSPITALS as HEART_HOSPITALS
from medpfl.demo.phantom import HOSPITALS, write_phantoms


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms")
    assert write_phantoms(folder, seed=0) == list(HOSPITALS)
    return folder


def voxels(folder: Path) -> dict[str, bytes]:
    """The stored voxels of every file: gzip stamps a time into the file itself."""
    return {
        str(path.relative_to(folder)): np.asarray(nib.load(path).dataobj).tobytes()
        for path in sorted(folder.rglob("*.nii.gz"))
    }


@pytest.mark.slow
def test_the_seed_decides_every_voxel(tmp_path: Path, phantoms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {site: replace(scanner, patients={"train": 1, "val": 1, "test": 1}) for site, scanner in HOSPITALS.items()}
    monkeypatch.setattr(phantom, "HOSPITALS", few)
    for name, seed in (("same", 0), ("other", 1)):
        write_phantoms(tmp_path / name, seed=seed)
    same, other, whole = voxels(tmp_path / "same"), voxels(tmp_path / "other"), voxels(phantoms)
    assert len(same) == 4 * 3 * 2
    for name, content in same.items():
        assert content == whole[name]  # and it does not depend on how many patients there are
        assert content != other[name]


def test_the_walk_through_says_how_many_scans_a_hospital_has() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    scans = [sum(scanner.patients.values()) for scanner in HOSPITALS.values()]
    assert (min(scans), max(scans)) == (12, 22) and "with twelve to twenty-two scans a hospital" in page


@pytest.mark.slow
def test_files_are_oriented_and_spaced_as_declared(phantoms: Path) -> None:
    for site, scanner in HOSPITALS.items():
        files = sorted((phantoms / site).rglob("*.nii.gz"))
        assert len(files) == 2 * sum(scanner.patients.values())
        for file in files:
            image = nib.load(file)
            assert "".join(nib.aff2axcodes(image.affine)) == scanner.axes
            turned = nib.as_closest_canonical(image)
            assert turned.header.get_zooms() == pytest.approx(scanner.voxel)
    assert len({scanner.axes for scanner in HOSPITALS.values()}) == len(HOSPITALS)


@pytest.mark.slow
def test_every_image_is_finite_and_every_label_map_has_the_organ(phantoms: Path) -> None:
    for site in HOSPITALS:
        for path in sorted((phantoms / site / "images").iterdir()):
            image, label = nib.load(path), nib.load(phantoms / site / "labels" / path.name)
            values, truth = np.asarray(image.dataobj), np.asarray(label.dataobj)
            assert np.isfinite(values).all() and values.std() > 0
            assert set(np.unique(truth)) == {0, 1}
            assert np.array_equal(image.affine, label.affine) and values.shape == truth.shape


def test_the_look_alike_mirrors_the_contrast(phantoms: Path) -> None:
    """At two hospitals the target is the brightest tissue, at two its twin is: what makes a shared model hard."""
    brighter = [scanner.target > scanner.twin for scanner in HOSPITALS.values()]
    assert brighter.count(True) == brighter.count(False) == 2


def test_site_files_load_and_patients_are_in_one_split(phantoms: Path) -> None:
    for site, scanner in HOSPITALS.items():
        dataset = load_site_file(phantoms, site).dataset("organ", Volumes)
        assert isinstance(dataset, Volumes)
        cases = dataset.cases(Problems())
        assert [len(some) for some in cases.values()] == list(scanner.patients.values())
        assert sum(map(len, cases.values())) == len({case.group for some in cases.values() for case in some})
        items = json.loads((phantoms / site / "datalist.json").read_text())
        patients = [[item["patient"] for item in items[key]] for key in ("training", "validation", "test")]
        assert len(set().union(*patients)) == sum(map(len, patients))
        volume = dataset.read(cases["train"][0])
        assert isinstance(volume.target, np.ndarray) and volume.target.any()
        assert volume.image.shape == (1, *volume.target.shape)


def heart_data() -> Path:
    """Where the downloaded UCI files are; the test is skipped where they are not."""
    root = Path(__file__).resolve().parents[2]
    for folder in (os.environ.get(ENVIRONMENT_VARIABLE), root.parent / "shared" / "data" / "uci_heart"):
        if folder and (Path(folder) / "processed.cleveland.data").is_file():
            return Path(folder)
    pytest.skip(f"the UCI heart-disease files are not here; set {ENVIRONMENT_VARIABLE} to their folder")


def test_absent_heart_data_say_what_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(DataError) as caught:
        write_heart(tmp_path / "sites")
    for word in ("nowhere", "Download", "'Heart Disease' (id 45)", "UCI", ENVIRONMENT_VARIABLE, "processed.va.data"):
        assert word in str(caught.value)
    assert not (tmp_path / "sites").exists()
    (tmp_path / "nowhere").mkdir()
    for name in ("cleveland", "hungarian", "va"):
        (tmp_path / "nowhere" / f"processed.{name}.data").touch()
    with pytest.raises(DataError, match=r"\(processed\.switzerland\.data missing\)"):
        write_heart(tmp_path / "sites")


@pytest.mark.parametrize(
    ("site", "rows", "train", "test"),
    [
        ("cleveland", 303, 199, 104),
        ("hungary", 261, 172, 89),
        ("switzerland", 46, 30, 16),
        ("long-beach", 130, 85, 45),
    ],
)
def test_heart_data_are_flambys(tmp_path: Path, site: str, rows: int, train: int, test: int) -> None:
    tables = {}
    for split in ("flamby", "validated"):
        assert write_heart(tmp_path / split, heart_data(), split) == list(HEART_HOSPITALS)
        dataset = load_site_file(tmp_path / split, site).dataset("heart", Table)
        assert isinstance(dataset, Table)
        tables[split] = read_table(dataset)
    flamby, validated = tables["flamby"], tables["validated"]
    assert len(flamby.rows) == rows
    assert {split: len(indices) for split, indices in flamby.splits.items()} == {
        "train": train,
        "validation": 0,
        "test": test,
    }
    assert validated.splits["test"] == flamby.splits["test"]
    assert (
        validated.splits["validation"] and len(validated.splits["train"]) + len(validated.splits["validation"]) == train
    )
    assert flamby.features.shape == (rows, 13)  # 8 numbers, 3 of 4 chest pains, 2 of 3 resting ECGs
    assert np.isfinite(flamby.features).all() and set(flamby.targets.tolist()) == {0, 1}
