# SPDX-License-Identifier: Apache-2.0
"""Whole volumes in, segmentations on the input's own voxels out: landmarks stay where they are."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.data.intensity import Window
from medpfl.data.preparation import Spec
from medpfl.data.readout import ByClass, ByRegion, Readout
from medpfl.data.target import Target
from medpfl.data.volumes.new import VolumesPreparation
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation

SIZE = (16, 16, 8)
SHAPE = (30, 37, 19)
LANDMARKS = [((3, 5, 2), 1), ((24, 30, 12), 2), ((14, 8, 9), 1)]  # first voxel of boxes of 4 x 4 x 4, and their class


def scene() -> NDArray[np.uint8]:
    label = np.zeros(SHAPE, np.uint8)
    for (x, y, z), value in LANDMARKS:
        label[x : x + 4, y : y + 4, z : z + 4] = value
    return label


def affine_of(voxel: tuple[float, float, float], axes: str, degrees: float) -> NDArray[np.float64]:
    """Anisotropic voxels along turned and named axes, somewhere off the scanner's centre."""
    turn = np.deg2rad(degrees)
    first = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
    second = np.array([[1, 0, 0], [0, np.cos(turn / 2), -np.sin(turn / 2)], [0, np.sin(turn / 2), np.cos(turn / 2)]])
    named = np.zeros((3, 3))
    for axis, letter in enumerate(axes):
        named["RAS".find(letter) if letter in "RAS" else "LPI".find(letter), axis] = 1 if letter in "RAS" else -1
    affine = np.eye(4)
    affine[:3, :3] = first @ second @ named @ np.diag(voxel)
    affine[:3, 3] = [31.0, -17.5, 6.25]
    return affine


def bright(inputs: Tensor) -> Tensor:
    """A network that tells the classes apart by their intensity: 0, 0.5 and 1."""
    return torch.cat([-((inputs - level) ** 2) * 100 for level in (0.0, 0.5, 1.0)], dim=1)


def predicted(file: Path, spacing: tuple[float, float, float], folder: Path) -> Any:
    task = Segmentation(
        "organ", size=SIZE, spacing=spacing, architecture=UNet((2, 4)), intensity=Window(low=0, high=200)
    )
    [case] = list(VolumesPreparation().new_cases(file, task.spec))
    assert case.save is not None and case.inputs.shape[:2] == (1, 1)
    folder.mkdir()
    with torch.inference_mode():
        row = case.save(task.infer(bright, case.inputs), folder, ["background", "one", "two"], True)
    assert row["file"] == file.name
    return nib.load(folder / file.name)


@pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR", "SAL"])
@pytest.mark.parametrize("degrees", [0.0, 25.0])
def test_on_the_files_own_grid_every_voxel_is_where_it_was(tmp_path: Path, axes: str, degrees: float) -> None:
    """Anisotropic, turned and rotated: resampling to the voxels' own size changes nothing, so the answer is exact."""
    affine, label = affine_of((1.0, 1.5, 3.0), axes, degrees), scene()
    file = tmp_path / "one.nii.gz"
    nib.save(nib.Nifti1Image(label.astype(np.float32) * 100, affine), file)
    order = ["RL", "AP", "SI"]
    lengths = {pair: (1.0, 1.5, 3.0)[axis] for axis, letter in enumerate(axes) for pair in order if letter in pair}
    spacing = (lengths["RL"], lengths["AP"], lengths["SI"])
    written = predicted(file, spacing, tmp_path / "out")
    assert np.array_equal(np.asarray(written.dataobj), label)
    np.testing.assert_allclose(written.affine, affine, atol=1e-5)
    shares: Any = nib.load(tmp_path / "out" / "one_probabilities.nii.gz")
    assert shares.shape == (*SHAPE, 3)
    np.testing.assert_allclose(np.asarray(shares.dataobj).sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize(("axes", "degrees"), [("RAS", 0.0), ("PIR", 0.0), ("LPS", 20.0)])
@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (1.3, 1.1, 2.0)])
def test_on_another_grid_landmarks_keep_their_places(
    tmp_path: Path, axes: str, degrees: float, spacing: tuple[float, float, float]
) -> None:
    affine, label = affine_of((1.0, 1.5, 3.0), axes, degrees), scene()
    file = tmp_path / "one.nii.gz"
    nib.save(nib.Nifti1Image(label.astype(np.float32) * 100, affine), file)
    found = np.asarray(predicted(file, spacing, tmp_path / "out").dataobj)
    for start, value in LANDMARKS:
        near = tuple(slice(max(at - 3, 0), at + 7) for at in start)
        # Between 0 and 1 lies the other class's 0.5, so a box of the brighter class has a rim of the darker one.
        places = np.argwhere(found[near] > 0) + [part.start for part in near]
        apart = affine[:3, :3] @ (places.mean(axis=0) - (np.array(start) + 1.5))
        assert np.linalg.norm(apart) < 0.75  # mm: less than a voxel along any axis
        middle = tuple(at + 2 for at in start)
        assert found[middle] == value and 0.6 * 64 < len(places) < 1.7 * 64


@pytest.mark.parametrize("readout", [ByClass(), ByRegion((1, 2))])
@pytest.mark.parametrize("degrees", [0.0, 25.0])
@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (3.0, 3.0, 4.0)])
def test_what_fills_a_scan_is_found_up_to_its_last_voxel(
    tmp_path: Path, spacing: tuple[float, float, float], degrees: float, readout: Readout
) -> None:
    """The task's grid may end before the scan does: by half of its voxels, and of a tilted scan with thick slices by
    more than one."""
    affine = affine_of((1.0, 1.5, 5.0), "LPS", degrees).astype(np.float32)
    file = tmp_path / "scan" / "one.nii.gz"
    file.parent.mkdir()
    nib.save(nib.Nifti1Image(np.full((14, 15, 9), 100, np.float32), affine), file)
    spec = Spec(Target.MASK, ("volumes",), (8, 8, 8), spacing, intensity=Window(0, 200), readout=readout)
    [case] = list(VolumesPreparation().new_cases(file, spec))
    regions = torch.cat([case.inputs * 4, case.inputs * 4], dim=1)  # 0.88 of both
    outputs = regions if isinstance(readout, ByRegion) else bright(case.inputs)
    assert case.save is not None
    case.save(outputs, tmp_path, ["background", "one", "two"], True)
    written: Any = nib.load(tmp_path / "one.nii.gz")
    shares: Any = nib.load(tmp_path / "one_probabilities.nii.gz")
    sure = np.asarray(shares.dataobj)[..., 1]
    assert (np.asarray(written.dataobj) == (2 if isinstance(readout, ByRegion) else 1)).all()
    assert sure.min() == pytest.approx(sure.max(), abs=1e-5) and sure.min() > 0.8


@pytest.mark.parametrize("shape", [(30, 30, 1), (5, 4, 3)])
def test_thin_and_small_volumes_are_predicted_too(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    label = np.zeros(shape, np.uint8)
    label[1:4, 1:4] = 2
    file = tmp_path / "one.nii.gz"
    nib.save(nib.Nifti1Image(label.astype(np.float32) * 100, np.diag([1.0, 1.0, 3.0, 1.0])), file)
    assert np.array_equal(np.asarray(predicted(file, (1.0, 1.0, 3.0), tmp_path / "out").dataobj), label)
