# SPDX-License-Identifier: Apache-2.0
"""Hospitals with different networks over FLARE: as in ``simulate``, and what of it is on the wire."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from in_process import Harness, tensors_of
from medpfl import store
from medpfl.core.mixers import Mean, Mixer
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.methods.kt_pfl import KTpFL
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.models.by_hospital import ByHospital
from medpfl.models.lenet import LeNet5
from medpfl.models.residual import ResidualNet
from medpfl.tasks import Classification
from pictures import TABLE, write_images
from tools import assert_same, outcome, run

pytestmark = pytest.mark.harness

NETWORKS = ByHospital(anna=ResidualNet(width=32), berta=LeNet5())
NARROW = ByHospital(anna=ResidualNet(width=4), berta=LeNet5())


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    files = {}
    for name in ("anna", "berta"):
        folder = tmp_path_factory.mktemp(name)
        write_images(folder, count=18)
        declared = {key: value for key, value in TABLE.items() if key != "masks"}
        declared |= {"files": f"{folder}/images/*.png", "table": {"file": f"{folder}/list.csv", "image": "id"}}
        files[name] = folder / "site.yaml"
        files[name].write_text(yaml.safe_dump({"datasets": {"skin": declared, "shared": {**declared, "public": True}}}))
    return files


def job(method: Method, mixers: dict[str, Mixer], networks: ByHospital = NETWORKS) -> Job:
    task = Classification("skin", size=(36, 36), architecture=networks)
    settings = Settings(rounds=2, references=("local",), finetune=0)
    return Job("small", 2, settings, mixers, replace(method, batch_size=6), task)


def test_only_the_messenger_is_on_the_wire(sites: dict[str, Path], tmp_path: Path) -> None:
    given = job(MHpFLID(epochs=1, distill_lr=1e-3, lr=1e-3), {"messenger": Mean()})
    harness = Harness(given, sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(given, sites, tmp_path / "simulated"))
    names = {name for _, _, payload in harness.wire for name in tensors_of(payload)}
    assert names and all(name.startswith("messenger::messenger.") for name in names)
    weights = {}
    for site in sites:
        kept, about = store.read(harness.folder / site / "medpfl" / "small" / "models" / "personal-last.safetensors")
        assert list(about["recipe"]["networks"]) == ["local_network"]
        weights[site] = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
        large = max(kept.values(), key=torch.Tensor.numel).numpy().tobytes()
        assert all(large not in payload for _, _, payload in harness.wire)
    largest = max(len(payload) for _, _, payload in harness.wire)
    assert weights["anna"] > 5 * largest  # an ordinary network; berta's LeNet is smaller than the messenger
    assert weights["berta"] < largest


def test_only_outputs_on_public_data_are_on_the_wire(sites: dict[str, Path], tmp_path: Path) -> None:
    method = KTpFL(public="shared", lr=1e-3)
    given = job(method, method.components(), NARROW)
    harness = Harness(given, sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(given, sites, tmp_path / "simulated"))
    found = [tensors_of(payload) for _, _, payload in harness.wire]
    assert {name for tensors in found for name in tensors} == {"public::public.values"}
    assert {tensor.shape for tensors in found for tensor in tensors.values()} == {(18, 2)}
