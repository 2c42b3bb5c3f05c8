# SPDX-License-Identifier: Apache-2.0
"""A job that is small as a file and asks a hospital to prepare inputs of which one alone fills its memory."""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import nibabel
import numpy as np
import pytest

from medpfl.core.errors import ConfigError, DataError, MedPFLError
from medpfl.data.intensity import ZScore
from medpfl.data.volumes.prepare import prepare, prepare_label, read_image
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation


@pytest.fixture
def bounded() -> Iterator[None]:
    import monai.transforms  # noqa: F401 (takes longer than all the rest)

    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    ("task", "size"),
    [(Classification, (200_000, 200_000)), (Classification, (4096, 4096, 4096)), (Segmentation, (65536, 65536))],
)
def test_inputs_of_an_absurd_size(task: type[Classification | Segmentation], size: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"'size' .* has more than 134217728 values"):
        _ = task(dataset="x", size=size).spec


@pytest.mark.slow
@pytest.mark.usefixtures("bounded")
def test_a_spacing_that_multiplies_a_volume(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.ones((16, 16, 16), np.float32), np.eye(4)), tmp_path / "a.nii")
    image, affine = read_image(tmp_path / "a.nii")
    fine = (0.001, 0.001, 0.001)
    for made in (
        lambda: prepare(image, affine, fine, None, ZScore()),
        lambda: prepare_label(image[0].astype(np.uint8), affine, fine, None),
    ):
        with pytest.raises((DataError, MedPFLError), match=r"spacing of 0.001 x 0.001 x 0.001 mm .* 134217728"):
            made()


def test_what_is_said_of_such_a_spacing_tells_no_size_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large volume the limit is 8 times its own voxels, which was told: of a CT with 512 x 512 pixels the number
    of its slices."""
    monkeypatch.setattr("medpfl.data.volumes.prepare.MOST_PREPARED", 100)
    said = set()
    for slices in (16, 19):
        with pytest.raises(DataError, match=f"{8 * 16 * 16 * slices} voxels") as error:
            prepare_label(np.ones((16, 16, slices), np.uint8), np.eye(4), (0.01, 0.01, 0.01), None)
        said.add(error.value.public)
    assert said == {"the task's spacing of 0.01 x 0.01 x 0.01 mm makes far too many voxels of a case"}
