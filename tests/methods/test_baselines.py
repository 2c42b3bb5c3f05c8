# SPDX-License-Identifier: Apache-2.0
"""What every baseline must do: come back from a kill as if nothing had been, live with absent hospitals, and leave
models that load and predict what was reported."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl.core.mixers import Mean, Mixer, RelaxedMean
from medpfl.data.site_file import load_site_file
from medpfl.demo.phantom import write_phantoms
from medpfl.deployed.model_file import load_deployed
from medpfl.methods.apfl import APFL
from medpfl.methods.contract import Method
from medpfl.methods.ditto import Ditto
from medpfl.methods.fedbn import FedBN
from medpfl.methods.fedper import FedPer
from medpfl.methods.fedprox import FedProx
from medpfl.methods.fedrep import FedRep
from medpfl.methods.lg_fedavg import LGFedAvg
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.pfedme import PFedMe
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation
from tools import Make, assert_same, exchange, normed, outcome, pieces, ready, run

SETTINGS: dict[str, Any] = {"lr": 0.05, "batch_size": 8}
METHODS: dict[str, tuple[Method, str, Mixer]] = {  # the method, its slot that travels, and the server component
    "FedBN": (FedBN(**SETTINGS), "model", Mean()),
    "FedProx": (FedProx(mu=0.1, **SETTINGS), "model", Mean()),
    "FedPer": (FedPer(**SETTINGS), "model", Mean()),
    "FedRep": (FedRep(head_epochs=2, **SETTINGS), "model", Mean()),
    "LGFedAvg": (LGFedAvg(**SETTINGS), "model", Mean()),
    "Ditto": (Ditto(lam=0.5, **SETTINGS), "global", Mean()),
    "APFL": (APFL(alpha_lr=0.5, **SETTINGS), "global", Mean()),
    "PFedMe": (PFedMe(lam=5.0, outer_lr=0.1, inner_steps=2, **SETTINGS), "global", RelaxedMean(beta=0.7)),
    "PerFedAvg": (PerFedAvg(inner_lr=0.1, **SETTINGS), "model", Mean()),
    "PerFedAvg-HF": (PerFedAvg(inner_lr=0.1, variant="hessian-free", **SETTINGS), "model", Mean()),
}


@pytest.fixture(params=METHODS)
def arguments(request: pytest.FixtureRequest) -> dict[str, Any]:
    method, slot, mixer = METHODS[request.param]
    return {"mixers": {slot: mixer}, "method": method, "task": normed()}


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    two = {site: table_sites[site] for site in ("anna", "berta")}
    whole = run(make_job(rounds=4, **arguments), two, tmp_path / "whole")
    simulate(make_job(rounds=4, **arguments), two, tmp_path / "a", tmp_path / "home", stop_after=2)
    coordinator = simulate(make_job(rounds=4, **arguments), two, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))
    assert any("resumed after round" in event.event for event in coordinator.record.events)
    for site in two:  # the private part too, which the server never saw
        first = sorted((tmp_path / "whole" / "home" / site / "small" / "models").glob("*.safetensors"))
        assert first
        for path in first:
            one, other = load_deployed(path), load_deployed(tmp_path / "home" / site / "small" / "models" / path.name)
            for key, value in one.networks.state_dict().items():
                assert torch.equal(value, other.networks.state_dict()[key]), f"{site} {path.name} {key}"


@pytest.mark.slow
def test_absent_hospitals_keep_what_is_theirs(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """In round 1 two answer; in round 2 the others join in with the shared part, from their own private part."""
    slot = next(iter(arguments["mixers"]))
    coordinator, runners = pieces(make_job(**arguments), table_sites, tmp_path)
    ready(coordinator, runners)
    start = {key: value.clone() for key, value in runners["dora"].models.state_dict().items()}
    answering = ["anna", "clara"]
    assert (
        coordinator.rounds.take_train(1, exchange(runners, coordinator.rounds.train_messages(1, answering)))
        == answering
    )
    for key, value in runners["dora"].models.state_dict().items():
        assert torch.equal(value, start[key])
    messages = coordinator.rounds.train_messages(2, coordinator.joined)
    shared = messages["dora"].slots[slot]
    for key, value in shared.items():
        if value.is_floating_point():
            assert torch.equal(value, messages["anna"].slots[slot][key]), key
    assert any(not torch.equal(value, start[key]) for key, value in shared.items())
    assert coordinator.rounds.take_train(2, exchange(runners, messages)) == sorted(table_sites)


@pytest.mark.slow
def test_deployed_models_predict_what_was_reported(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    task = arguments["task"]
    result = run(make_job(**arguments), table_sites, tmp_path)
    told = {(line["site"], line["model"], line["choice"]): line["metrics"] for line in result["test"]}
    names = list(arguments["method"].deploys)
    assert not {"local", "fedavg"} & set(names)
    for site, file in table_sites.items():
        data = task.load(load_site_file(file, site))
        for name in names:
            for choice in ("best", "last"):
                model = load_deployed(tmp_path / "home" / site / "small" / "models" / f"{name}-{choice}.safetensors")
                found = task.evaluate(task.decide(model(data.splits["test"].inputs)), data.splits["test"])
                assert found.metrics == pytest.approx(told[site, name, choice], nan_ok=True)


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("phantoms")
    return {site: folder / f"{site}.yaml" for site in write_phantoms(folder)[2:]}


@pytest.mark.slow
def test_trains_a_unet_on_volumes(
    make_job: Make, phantoms: dict[str, Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    task = Segmentation(dataset="organ", size=(16, 16), spacing=(12.0, 12.0, 24.0), architecture=UNet((4, 8)))
    method = dataclasses.replace(arguments["method"], steps=3)
    result = run(make_job(rounds=1, mixers=arguments["mixers"], method=method, task=task), phantoms, tmp_path)
    scores = [line["metrics"]["dice"] for line in result["test"]]
    assert len(scores) == 2 * 2 * len(method.deploys) and all(0 <= score <= 1 for score in scores)
