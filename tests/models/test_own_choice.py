# SPDX-License-Identifier: Apache-2.0
"""A hospital that chooses its own network, in its site file: as if the job had named it, and told to nobody."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medpfl.check.trial import try_job
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError, SiteFileError
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.flare.allow import component_classes
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.models.by_hospital import ByHospital, OwnChoice
from medpfl.models.lenet import LeNet5
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.tasks import Classification, Segmentation
from medpfl.tasks.contract import Task
from pictures import TABLE, declare, write_images
from tools import run

TINY = ResNet(width=4, depth=10, pool=False)
NAMED = ByHospital(anna=TINY, berta=LeNet5())
TASK = Classification("skin", size=(36, 36), architecture=OwnChoice())


def site(folder: Path, network: Any = None, count: int = 18) -> Path:
    folder.mkdir()
    write_images(folder, count=count)
    path = declare(folder, TABLE)
    if network is not None:
        path.write_text(path.read_text() + yaml.safe_dump({"networks": {"skin": network}}))
    return path


def job(task: Task) -> Job:
    method = MHpFLID(epochs=1, lr=1e-3, distill_lr=1e-3, batch_size=6)
    return Job("small", 1, Settings(rounds=2, references=(), finetune=0), {}, method, task)


@pytest.mark.parametrize("architecture", [OwnChoice(), ByHospital(anna=TINY, default=OwnChoice())])
@pytest.mark.slow
def test_it_is_as_if_the_job_had_named_it(architecture: Any, tmp_path: Path) -> None:
    sites = {name: site(tmp_path / name, spec_of(NAMED.at(name))) for name in ("anna", "berta")}
    found = {}
    for name, given in (("own", architecture), ("named", NAMED)):
        run(job(replace(TASK, architecture=given)), sites, tmp_path / name)
        for hospital in sites:
            model = load_deployed(
                tmp_path / name / "home" / hospital / "small" / "models" / "personal-last.safetensors"
            )
            assert model.task.architecture == NAMED.at(hospital)  # type: ignore[attr-defined]
            found[name, hospital] = model.networks.state_dict()
    for hospital in sites:
        ours, theirs = found["own", hospital], found["named", hospital]
        assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
    told = (tmp_path / "own" / "results" / "summary.json").read_text()
    assert "OwnChoice" in told and "LeNet5" not in told  # the server is not told


def test_a_site_file_without_a_network_or_with_another(tmp_path: Path) -> None:
    none = load_site_file(site(tmp_path / "none"))
    with pytest.raises(SiteFileError, match="'networks' names none for 'skin'; named: none") as caught:
        TASK.chosen(none)
    assert caught.value.public == "this hospital's site file names no network for 'skin'"
    for number, (wrong, words) in enumerate(
        [
            ({"path": "medpfl.models.lenet.LeNet6"}, "there is no class 'medpfl.models.lenet.LeNet6'"),
            ({"path": "medpfl.core.mixers.Mean"}, "'medpfl.core.mixers.Mean' is no Architecture"),
            ({"path": "medpfl.models.resnet.ResNet", "args": {"width": 0}}, "width must be at least 1, got 0"),
            (spec_of(OwnChoice()), "expected one network, got OwnChoice"),
            (spec_of(NAMED), "expected one network, got ByHospital"),
        ]
    ):
        with pytest.raises(SiteFileError, match=words) as caught:
            TASK.chosen(load_site_file(site(tmp_path / str(number), wrong)))
        assert "site.yaml: 'networks.skin': " in str(caught.value)
        assert caught.value.public == "the network that this hospital's site file names for 'skin' cannot be used"
    lengths = Segmentation("skin", size=(36, 36), architecture=OwnChoice())
    with pytest.raises(SiteFileError, match="size must be 2 multiples of 8"):
        lengths.chosen(load_site_file(site(tmp_path / "unet", spec_of(UNet((4, 8, 8, 8))))))
    fixed = replace(TASK, architecture=TINY)
    assert fixed.chosen(none) is fixed  # a job that names networks does not ask


def test_checking_data_tries_the_hospitals_own_network(tmp_path: Path) -> None:
    path = site(tmp_path / "berta", spec_of(LeNet5()))
    by_job = replace(TASK, architecture=NAMED)
    weights = try_job("a job", TASK, load_site_file(path)).parameters
    assert weights == try_job("a job", by_job, load_site_file(path), "berta").parameters > 0
    assert weights != try_job("a job", by_job, load_site_file(path), "anna").parameters
    assert "none without a hospital's name" in try_job("a job", by_job, load_site_file(path)).failure
    assert "names no network for zoe" in try_job("a job", by_job, load_site_file(path), "zoe").failure


def test_configuration_and_back() -> None:
    spec = json.loads(json.dumps(spec_of(TASK)))
    assert build(spec, Task, "task") == TASK and TASK.networks_differ
    mixed = ByHospital(anna=OwnChoice(), default=OwnChoice())
    assert mixed.differs and mixed.multiple == 1 and mixed.at("zoe") == OwnChoice()
    assert "medpfl.models.by_hospital.OwnChoice" in component_classes()
    with pytest.raises(ConfigError, match="the job leaves the network to the hospitals"):
        OwnChoice().build((3, 36, 36), 1)
