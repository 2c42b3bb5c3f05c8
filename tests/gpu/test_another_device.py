# SPDX-License-Identifier: Apache-2.0
"""Every method's whole job on a device that is not the processor: nothing is left on the wrong one, no bit differs."""

import importlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from answers import declare
from elsewhere import DEVICE, Elsewhere, There
from evaluating import evaluate_at
from every_method import EVERY, write_both
from medpfl.compare import patients
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.deployed.torchscript import write_torchscript
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.auto import Auto
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedsm import FedSM
from medpfl.methods.local import Local
from medpfl.models.resnet import ResNet
from medpfl.privacy import DPSGD
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Classification, MultiLabel, Regression, Survival
from medpfl.tasks.contract import Task
from small_jobs import for_few
from small_volumes import VOLUMES, write_volume_sites


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job trains on from now on, within ``Elsewhere``."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type])
    monkeypatch.setattr("medpfl.rounds.hospital.site.training_device", lambda *_, **__: DEVICE)
    monkeypatch.setattr("medpfl.rounds.hospital.site.bytes_for_data", lambda *_: 2**20)
    # Tensors of one's own know no inference mode.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else nullcontext())


def done(job: Job, sites: dict[str, Path], folder: Path) -> tuple[Any, ...]:
    """Losses, validation and tests of a job, and what its hospitals keep."""
    simulate(job, sites, folder / "results", folder / "home")
    lines = [json.loads(line) for line in (folder / "results" / "metrics.jsonl").read_text().splitlines()]
    told = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    summary = json.loads((folder / "results" / "summary.json").read_text())
    kept = sorted(file.relative_to(folder) for file in (folder / "home").rglob("*.csv"))
    return told, summary["test"], summary["events"], {str(file): (folder / file).read_text() for file in kept}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_job_on_another_device_is_the_same_to_the_bit(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, training, further exchanges, validation, state on disk, fine-tuning and tests; data stay there."""
    small = EVERY[name]
    expected = done(small.job(precision="fp32"), sites[small.images], tmp_path / "here")
    on_another_device(monkeypatch)
    with Elsewhere():
        found = done(small.job(precision="fp32"), sites[small.images], tmp_path / "there")
    assert found == expected and found[1] and found[3]


def with_references(method: Method, task: Task, rounds: int = 2) -> Job:
    return Job("small", 2, Settings(rounds=rounds, references=("local", "fedavg"), finetune=1), {}, method, task)


def outcomes(folder: Path, answer: str) -> dict[str, Path]:
    return {site: for_few(declare(folder, site, answer, rows=60)) for site in ("anna", "berta")}


SURVIVAL = Survival(dataset="ward", horizons=(50.0,))
OTHERS: dict[str, tuple[Job, Callable[[Path], dict[str, Path]]]] = {
    "volumes": (with_references(FedSM(batch_size=3, lr=0.01, selector_steps=1), VOLUMES), write_volume_sites),
    "several": (with_references(Auto(batch_size=12), MultiLabel(dataset="ward")), partial(outcomes, answer="several")),
    "value": (
        with_references(FedAvg(batch_size=12), Regression(dataset="ward", centre=5.0, spread=4.0)),
        partial(outcomes, answer="value"),
    ),
    "survival": (with_references(FedAvg(batch_size=12), SURVIVAL), partial(outcomes, answer="survival")),
    "record-level noise": (
        with_references(
            FedAvg(batch_size=12, privacy=DPSGD(noise_multiplier=1.0)),
            Regression(dataset="ward", centre=5.0, spread=4.0),
        ),
        partial(outcomes, answer="value"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.usefixtures("few_resamples")  # of scores, which are computed on the processor in any case
def test_other_data_on_another_device(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside two references: whole volumes, several labels, numbers, times until an event, and noise. Survival's loss
    is another sum there."""
    job, write = OTHERS[what]
    sites = write(tmp_path / "sites")
    monkeypatch.setenv("MEDPFL_NOISE_SEED", "1")
    here = done(job, sites, tmp_path / "here")
    on_another_device(monkeypatch)
    with Elsewhere():
        there = done(job, sites, tmp_path / "there")
    if what != "survival":
        assert there == here
    assert [line["site"] for line in there[1]] == [line["site"] for line in here[1]] and here[1] and here[3]


def test_the_other_device_tells_what_was_left_behind() -> None:
    with Elsewhere():
        weights = torch.ones(3).to(DEVICE)
        assert isinstance(weights, There) and weights.device == DEVICE and weights.cpu().tolist() == [1, 1, 1]
        assert float((weights * 2).sum()) == 6
        assert isinstance(torch.zeros(2, device=DEVICE), There)
        with pytest.raises(RuntimeError, match="same device"):
            weights + torch.ones(3)


def trained(sites: dict[str, Path], folder: Path) -> tuple[Task, Path]:
    """A task, and the file of the model that anna has of it after a round."""
    task = Classification("skin", size=(36, 36), architecture=ResNet(width=2, depth=10))
    settings = Settings(rounds=1, references=(), finetune=0)
    simulate(Job("small", 2, settings, {}, Local(steps=2), task), sites, folder, folder)
    return task, next((folder / "anna").rglob("local-last.safetensors"))


def test_a_model_predicts_elsewhere_and_is_exported_here(
    sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same numbers; and its networks come back, for whoever calls or exports the model next."""
    _, file = trained(sites[True], tmp_path)
    pictures, site = sites[True]["anna"].parent / "own" / "images", load_site_file(sites[True]["anna"])
    rows = {}
    for where, device in (("here", nullcontext()), ("there", Elsewhere())):
        model = load_deployed(file)
        if where == "there":
            monkeypatch.setattr("medpfl.deployed.predict.training_device", lambda: DEVICE)
        with device:
            rows[where] = predict(model, pictures, tmp_path / where).rows
            evaluate_at(model, site, "test")
        assert {tensor.device.type for tensor in model.networks.state_dict().values()} == {"cpu"}
    assert rows["there"] == rows["here"] and rows["here"]
    write_torchscript(model, tmp_path / "model.pt")


def test_what_a_comparison_keeps_of_patients_is_computed_on_the_device(
    sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was computed on the processor where there is a GPU, too."""
    task, file = trained(sites[True], tmp_path)
    model = load_deployed(file)
    data, kept, used = task.load(load_site_file(sites[True]["anna"])), {}, set()
    decide = patients.decide

    def seen(*given: Any) -> torch.Tensor:
        used.update({given[-1], *(tensor.device for tensor in given[2].state_dict().values())})
        return decide(*given)

    monkeypatch.setattr(patients, "decide", seen)
    for where, device in (("here", nullcontext()), ("there", Elsewhere())):
        if where == "there":
            used.clear()
            monkeypatch.setattr(patients, "training_device", lambda: DEVICE)
        with device:
            found = patients.Kept(task)
            found.add("Local", "anna", model, data)
        (tmp_path / where).mkdir()
        found.write(tmp_path / where)
        with np.load(tmp_path / where / patients.CASES) as file:
            kept[where] = {name: file[name].tolist() for name in file}
    assert kept["there"] == kept["here"] and kept["here"] and used == {DEVICE}
    assert {tensor.device.type for tensor in model.networks.state_dict().values()} == {"cpu"}
