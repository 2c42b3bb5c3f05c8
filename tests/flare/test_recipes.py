# SPDX-License-Identifier: Apache-2.0
"""Recipes are typed jobs in FLARE's idiom: they export what jobs/ says, and refuse what FLARE would add in silence."""

import json
import shutil
from pathlib import Path

import pytest
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.recipe import PocEnv, SimEnv
from nvflare.recipe.utils import add_experiment_tracking

from medpfl import (
    Classification,
    CusFLRecipe,
    FedAPRecipe,
    FedSMRecipe,
    MedPFLRecipe,
    MHpFLIDRecipe,
    PFedNetRecipe,
    Segmentation,
    Settings,
    Tabular,
)  # fmt: skip
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.mixers import NetworkProx, ServerAdam
from medpfl.flare.allow import component_classes
from medpfl.flare.recipes import Recipe
from medpfl.job import EvaluationJob, Job, load_job, write_job
from medpfl.methods.cusfl import CusFL
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedsm import FedSM
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.pfednet import PFedNet
from medpfl.models.by_hospital import ByHospital
from medpfl.models.lenet import LeNet5
from medpfl.models.light import MobileNetV2, ShuffleNetV2
from medpfl.models.residual import ResidualNet
from medpfl.models.tabnet import TabNet
from medpfl.models.unet import UNet
from medpfl.results.trackers.tensorboard import TensorBoard

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SHORT = Settings(rounds=12, train_timeout=600, grace=120)


def _recipes() -> list[Recipe]:
    """One a method: what a user writes in place of the JSON of jobs/."""
    unet = UNet(channels=(16, 32, 64), residual_units=1)
    organ = Segmentation(dataset="organ", size=(48, 48), spacing=(4.0, 4.0, 8.0), architecture=unet)
    networks = ByHospital(
        rosendahl=ResidualNet(blocks=(2, 2, 2, 2)),
        vidir_modern=ResidualNet(blocks=(1, 1, 2, 1), squeeze=True),
        vidir_molemax=MobileNetV2(widths=(16, 32, 64)),
        vienna_dias=ShuffleNetV2(widths=(64, 128, 256)),
    )
    return [
        FedSMRecipe(
            name="fedsm_phantom", min_clients=3, settings=SHORT, task=organ,
            method=FedSM(steps=15, lr=0.002, batch_size=16),
            components={"selector": ServerAdam(lr=0.03, uniform=True)},
        ),
        CusFLRecipe(
            name="cusfl_phantom", min_clients=3, settings=SHORT, task=organ,
            method=CusFL(steps=15, lr=0.002, batch_size=16),
        ),
        FedAPRecipe(
            name="fedap_skin", min_clients=3, settings=Settings(rounds=60, train_timeout=600, grace=120),
            method=FedAP(epochs=1, lr=0.001, batch_size=32),
            task=Classification(dataset="skin_diagnosis", size=(48, 64), architecture=LeNet5()),
        ),
        PFedNetRecipe(
            name="pfednet_heart", min_clients=3, settings=Settings(rounds=20, train_timeout=600, grace=120),
            method=PFedNet(personal=("",), steps=20, lr=0.01, batch_size=16),
            task=Tabular(dataset="heart", architecture=TabNet(width=8, steps=3)),
            components={"personal": NetworkProx(tau=0.5, neighbours=1)},
        ),
        MHpFLIDRecipe(
            name="mhpflid_skin", min_clients=4,
            settings=Settings(rounds=20, references=("local",), train_timeout=600, grace=120, finetune=0),
            method=MHpFLID(epochs=4, lr=0.001, distill_epochs=1, distill_lr=0.0001, batch_size=16),
            task=Classification(dataset="skin_diagnosis", size=(48, 64), architecture=networks),
        ),
    ]  # fmt: skip


@pytest.fixture(params=_recipes(), ids=lambda recipe: str(recipe.name))
def recipe(request: pytest.FixtureRequest) -> Recipe:
    found: Recipe = request.param
    return found


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_recipe_of_each_method_exports_the_shipped_job(recipe: Recipe, tmp_path: Path) -> None:
    """To the byte, once the shipped job is written with the defaults that its folder leaves out."""
    shipped = load_job(JOBS / recipe.name)
    assert isinstance(shipped, Job)
    recipe.export(str(tmp_path))
    assert load_job(tmp_path / recipe.name) == shipped
    assert contents(tmp_path / recipe.name) == contents(write_job(shipped, tmp_path / "shipped"))
    valid, error, _ = JobMetaValidator().validate(recipe.name, zip_directory_to_bytes(str(tmp_path), recipe.name))
    assert valid, error


@pytest.mark.parametrize("name", sorted(path.name for path in JOBS.iterdir()))
def test_every_shipped_job_can_be_a_recipe(name: str, tmp_path: Path) -> None:
    job = load_job(JOBS / name)
    assert not isinstance(job, EvaluationJob)
    recipe = MedPFLRecipe(
        method=job.method, task=job.task, settings=job.settings, name=job.name, min_clients=job.min_clients,
        components=job.components, codecs=job.codecs, trackers=job.trackers,
    )  # fmt: skip
    recipe.export(str(tmp_path))
    again = load_job(tmp_path / name)
    assert again == job and again.components == job.components


def test_an_export_replaces_itself_and_nothing_else(tmp_path: Path) -> None:
    first, *_ = _recipes()
    first.export(str(tmp_path))
    first.export(str(tmp_path))
    (tmp_path / first.name / "meta.json").write_text(json.dumps({"name": "another"}))
    with pytest.raises(ConfigError, match="is there already and is no job of this name"):
        first.export(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_what_cannot_be_exported_whole_leaves_the_job_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed before the new one was there, and half of that lay in its place."""

    def full(source: str, target: Path) -> None:
        target.mkdir()
        raise shutil.Error([(source, str(target), "[Errno 28] No space left on device")] * 3)

    first, *_ = _recipes()
    first.export(str(tmp_path))
    before = (tmp_path / first.name / "meta.json").read_text()
    monkeypatch.setattr("medpfl.flare.recipes.shutil.copytree", full)
    with pytest.raises(MedPFLError, match=rf"cannot write .*{first.name}: \[Errno 28\] No space left on device$"):
        first.export(str(tmp_path))
    assert (tmp_path / first.name / "meta.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_what_a_recipe_refuses_is_an_error_of_medpfl(tmp_path: Path) -> None:
    def recipe(name: str = "organ", min_clients: int = 2) -> Recipe:
        method, task = FedSM(steps=1, lr=0.1), Tabular(dataset="x")
        return MedPFLRecipe(method=method, task=task, settings=SHORT, name=name, min_clients=min_clients)

    with pytest.raises(ConfigError, match=r"'name' must be letters, digits, .* got 'our organ'"):
        recipe(name="our organ")
    with pytest.raises(ConfigError, match="'min_clients' must be a whole number above 0, got 0"):
        recipe(min_clients=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(MedPFLError, match=r"cannot write .*file/jobs/organ: "):
        recipe().export(str(tmp_path / "file" / "jobs"))


def test_where_flare_makes_the_sites_the_job_brings_its_code(tmp_path: Path) -> None:
    first, *_ = _recipes()
    for number, env in enumerate((SimEnv(num_clients=2), PocEnv(num_clients=2), None)):
        first.export(str(tmp_path / str(number)), env=env)
    there = [(tmp_path / str(number) / first.name / "app" / "custom" / "medpfl").is_dir() for number in range(3)]
    assert there == [True, True, False]


def test_what_flare_would_add_is_refused_by_name(tmp_path: Path) -> None:
    first, *_ = _recipes()
    with pytest.raises(ConfigError, match="dict for server: a recipe of MedPFL is changed by its arguments alone"):
        first.add_server_config({"stream": True})
    with pytest.raises(ConfigError, match="FedSMRecipe takes FedSM, got FedAP"):
        FedSMRecipe(method=FedAP(lr=0.1), task=Tabular(dataset="x"), settings=SHORT)  # type: ignore[arg-type]


def test_flares_experiment_tracking_becomes_our_tracker(tmp_path: Path) -> None:
    first, other, *_ = _recipes()
    add_experiment_tracking(first, "tensorboard")
    assert first.job.trackers == (TensorBoard(),)
    first.export(str(tmp_path))
    assert load_job(tmp_path / first.name).trackers == (TensorBoard(),)
    assert "medpfl.results.trackers.tensorboard.TensorBoard" in component_classes()
    with pytest.raises(ConfigError, match="TBAnalyticsReceiver: 'tb_folder' cannot be changed here: expected 'tb_ev"):
        add_experiment_tracking(other, "tensorboard", {"tb_folder": "elsewhere"})
    with pytest.raises(ConfigError, match="TBAnalyticsReceiver for @ALL: a recipe of MedPFL is changed by its argu"):
        add_experiment_tracking(other, "tensorboard", client_side=True, server_side=False)
    assert other.job.trackers == ()
