# SPDX-License-Identifier: Apache-2.0
"""nnU-Net's intensities for CT: fitted on the training part's foreground, kept in the model's file, never sent."""

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bundled import as_in_bundles
from evaluating import evaluate_at
from medpfl.core.errors import ConfigError, DataError
from medpfl.core.mixers import Mean
from medpfl.data.intensity import Fixed, Foreground
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target
from medpfl.data.volumes.new import VolumesPreparation
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation
from small_volumes import write_volume_sites

SPEC = Spec(Target.MASK, ("volumes",), (8, 8, 4), (2.0, 2.0, 2.0), intensity=Foreground())


def foreground(folder: Path, split: str) -> NDArray[np.float32]:
    """All foreground voxels of a split, from the files themselves."""
    found = []
    for item in json.loads((folder / "list.json").read_text())[split]:
        image, label = (np.asarray(nib.load(folder / item[key]).dataobj) for key in ("image", "label"))  # type: ignore
        found.append(image[label > 0])
    return np.concatenate(found)


def test_the_training_parts_foreground_says_the_numbers(tmp_path: Path) -> None:
    site = write_volume_sites(tmp_path, ("anna",))["anna"]
    data = load_site_file(site).load("organ", SPEC)
    voxels = foreground(tmp_path / "anna", "training")
    low, high = np.percentile(voxels, (0.5, 99.5))
    assert isinstance(data.preparation, VolumesPreparation) and data.preparation.fitted is not None
    fitted = data.preparation.fitted
    assert fitted.low == (pytest.approx(low),) and fitted.high == (pytest.approx(high),)
    assert fitted.mean == (pytest.approx(voxels.mean(dtype=np.float64)),)
    assert fitted.deviation == (pytest.approx(voxels.std(dtype=np.float64)),)
    assert data.preparation.shared() == {"kind": "volumes"}  # what leaves has no number of them
    whole: Any = data.splits["test"].inputs
    image: Any = nib.load(tmp_path / "anna" / "test0_image.nii.gz")
    expected = (np.clip(np.asarray(image.dataobj), low, high) - voxels.mean()) / voxels.std()
    np.testing.assert_allclose(whole.whole(0)[0].numpy(), expected, atol=1e-4)
    [first, _] = VolumesPreparation.model_validate(data.preparation.model_dump(mode="json")).new_cases(
        tmp_path / "anna" / "two.json" if (tmp_path / "anna" / "two.json").exists() else _two(tmp_path / "anna"), SPEC
    )
    assert torch.equal(first.inputs[0], whole.whole(0))


def _two(folder: Path) -> Path:
    file = folder / "two.json"
    file.write_text(json.dumps({"test": json.loads((folder / "list.json").read_text())["test"]}))
    return file


def test_each_channel_has_its_own_numbers_and_a_constant_one_becomes_0() -> None:
    voxels = [np.arange(1000, dtype=np.float32), np.full(1000, 7, np.float32)]
    fitted = Foreground().fitted(voxels)
    assert fitted.low == (pytest.approx(4.995), 7.0) and fitted.high == (pytest.approx(994.005), 7.0)
    image = torch.stack([torch.tensor([-5.0, 499.5, 2000.0]), torch.tensor([7.0, 8.0, 9.0])]).view(2, 3, 1, 1)
    found = fitted(image)
    deviation = float(np.arange(1000).std())
    expected = [(4.995 - 499.5) / deviation, 0.0, (994.005 - 499.5) / deviation]
    torch.testing.assert_close(found[0].flatten(), torch.tensor(expected), atol=1e-5, rtol=0)
    assert not found[1].any()
    with pytest.raises(ConfigError, match="of 2 channels, the volume has 1"):
        fitted(image[:1])
    single = Fixed((0.0,), (10.0,), (4.0,), (2.0,))
    given = torch.tensor([-1.0, 4.0, 12.0]).view(1, 3, 1, 1)
    assert as_in_bundles(single, given).flatten().tolist() == pytest.approx(single(given).flatten().tolist())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 <= low < high <= 100"):
        Foreground(low=50, high=20)
    with pytest.raises(DataError, match=r"does not hold its hospital's statistics of intensities"):
        list(VolumesPreparation().new_cases(tmp_path, SPEC))
    site = write_volume_sites(tmp_path, ("anna",))["anna"]
    for file in (tmp_path / "anna").glob("training*_label.nii.gz"):
        label: Any = nib.load(file)
        nib.save(nib.Nifti1Image(np.zeros(label.shape, np.uint8), label.affine), file)
    with pytest.raises(DataError, match="no training volume has foreground"):
        load_site_file(site).load("organ", SPEC)


@pytest.mark.slow
def test_a_model_predicts_with_its_own_hospitals_numbers_and_they_do_not_leave(tmp_path: Path) -> None:
    sites = write_volume_sites(tmp_path / "sites")
    task = Segmentation("organ", SPEC.size, SPEC.spacing, UNet((2, 4)), intensity=Foreground())
    method = FedAvg(steps=20, lr=0.02, batch_size=2)
    job = Job("t", 2, Settings(rounds=1, references=(), finetune=0), {"fedavg": Mean()}, method, task)
    simulate(job, sites, tmp_path / "results", tmp_path / "home")
    numbers = []
    for name in sites:
        model = load_deployed(tmp_path / "home" / name / "t" / "models" / "fedavg-best.safetensors")
        fitted: Any = model.preparation["fitted"]
        numbers.append(fitted["mean"][0])
        evaluation = evaluate_at(model, load_site_file(sites[name]), "test")
        found = predict(model, _two(tmp_path / "sites" / name), tmp_path / "out" / name)
        assert [row["dice"] for row in found.rows] == [pytest.approx(one["dice"], abs=1e-5) for one in evaluation.cases]
    assert numbers[0] != numbers[1]
    left = b"".join(file.read_bytes() for file in (tmp_path / "results").rglob("*") if file.is_file())
    assert left and not any(str(number)[:8].encode() in left for number in numbers)
