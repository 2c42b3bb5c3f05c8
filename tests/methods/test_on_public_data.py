# SPDX-License-Identifier: Apache-2.0
"""FedMD, DS-FL, FedDF, KT-pFL: what travels, what is learnt of it, the learnt mixture, and public data that differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from baselines import assert_resumes, begin, held, play
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError, DataError, SiteFileError
from medpfl.core.mixers import KnowledgeTransfer, Mean, RoundInfo
from medpfl.core.mixers.knowledge_transfer import divergence_slope, on_simplex
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.methods.dsfl import DSFL
from medpfl.methods.feddf import FedDF
from medpfl.methods.fedmd import FedMD
from medpfl.methods.kt_pfl import KTpFL
from medpfl.methods.on_public_data import OnPublicData, PublicOutputs
from medpfl.models.by_hospital import ByHospital
from medpfl.models.lenet import LeNet5
from medpfl.models.resnet import ResNet
from medpfl.models.unet import FCN, UNet
from medpfl.rounds.held_alike import read_common
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks import Classification, Segmentation
from medpfl.tasks.contract import Task
from medpfl.tasks.tabular import Tabular
from pictures import MASKS, TABLE, write_images
from small_jobs import on_its_own
from tools import run

METHODS: list[type[OnPublicData]] = [FedMD, DSFL, FedDF, KTpFL]
CLASSES = {"nv": ["nv"], "bkl": ["bkl"], "mel": ["mel"]}
NETWORKS = ByHospital(anna=ResNet(width=4, depth=10, pool=False), default=LeNet5())
TASK = Classification("skin", size=(24, 24), architecture=NETWORKS)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two hospitals with data of their own, of three classes, and the same public images."""
    files = {}
    for name, count in (("anna", 24), ("berta", 18)):
        folder = tmp_path_factory.mktemp(name)
        write_images(folder / "own", count=count)
        write_images(folder / "shared", count=14)
        files[name] = write_declared(folder, "own", "shared")
    return files


def write_declared(folder: Path, own: str, shared: str, **changes: Any) -> Path:
    def declared(place: str) -> dict[str, Any]:
        return {
            **TABLE,
            "files": f"{place}/images/*.png",
            "table": {"file": f"{place}/list.csv", "image": "id"},
            "label": {"column": "dx", "classes": CLASSES},
            "masks": {**MASKS, "files": f"{place}/masks/*.png"},
        }

    content = {"datasets": {"skin": declared(own), "shared": {**declared(shared), "public": True, **changes}}}
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def job(method: type[OnPublicData], rounds: int = 2, task: Task = TASK, local: bool = False, **given: Any) -> Job:
    made = method(public="shared", batch_size=6, lr=3e-3, **given)
    references = ("local",) if local else ()
    return Job("small", 1, Settings(rounds=rounds, references=references, finetune=0), {}, made, task)


def said(runner: SiteRunner) -> torch.Tensor:
    """A hospital's logits of the public images."""
    with torch.inference_mode():
        logits: torch.Tensor = runner.models["model"].eval()(runner.ready.common.public["shared"])
    return logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_only_outputs_on_public_data_travel(method: type[OnPublicData], sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begin(job(method, local=True), sites, tmp_path)
    sent = play(coordinator, runners, 1)
    mean = []
    for site, runner in runners.items():
        assert list(sent[site]) == ["public"] and list(sent[site]["public"]) == ["public.values"]
        values, logits = sent[site]["public"]["public.values"], said(runner)
        expected = logits if method in (FedMD, FedDF) else logits.softmax(dim=1)
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
        mean.append(values)
        alone, taught = held(runner, "local"), held(runner, "model")  # nothing was heard before the first round
        assert all(torch.equal(value, taught[key]) for key, value in alone.items())
    back = coordinator.rounds.train_messages(2, sorted(sites))
    if method is not KTpFL:
        for site in sites:
            got = back[site].slots["public"]["public.values"]
            torch.testing.assert_close(got, (mean[0] + mean[1]) / 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_hospitals_come_closer_on_public_data(
    method: type[OnPublicData], sites: dict[str, Path], tmp_path: Path
) -> None:
    """``learn`` moves a network towards what it heard, changes nothing else, and sees one order everywhere."""
    given = job(method, distill_epochs=20)
    coordinator, runners = begin(given, sites, tmp_path)
    play(coordinator, runners, 1)
    assert isinstance(given.method, OnPublicData)
    orders: list[list[list[int]]] = []
    teacher = given.method.told(2 * torch.randn(14, 3, generator=torch.Generator().manual_seed(0)))
    for runner in runners.values():
        slot = runner.models["public"]
        assert isinstance(slot, PublicOutputs)
        slot.values.copy_(teacher)
        site = runner.rounds.site(given.method, 2)
        orders.append([rows.tolist() for rows, _ in site.public_batches("shared", 2)])
        heard = slot.values.clone()
        before = float(given.method.lesson(heard, said(runner)))
        given.method.learn(site)
        assert float(given.method.lesson(heard, said(runner))) < 0.9 * before
        assert torch.equal(slot.values, heard) and site.last_loss != site.last_loss
    assert orders[0] == orders[1] and sorted(row for rows in orders[0][:3] for row in rows) == list(range(14))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_resuming_and_what_is_deployed(method: type[OnPublicData], sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: job(method, rounds=4), sites, tmp_path)
    model = load_deployed(next((tmp_path / "home" / "anna").rglob("personal-best.safetensors")))
    assert list(model.networks) == ["model"] and model(torch.rand(2, 3, 24, 24)).shape == (2, 3)


@pytest.mark.slow
def test_segmentation_with_different_networks(sites: dict[str, Path], tmp_path: Path) -> None:
    networks = ByHospital(anna=UNet((4, 8)), berta=FCN((4, 8)))
    task = Segmentation("skin", size=(8, 8), architecture=networks)
    done = run(job(FedDF, task=task), sites, tmp_path)
    (values,) = done["slots"]["public"].values()
    assert values.shape == (14, 2, 8, 8)


def test_lessons() -> None:
    logits = torch.randn(5, 3).double().requires_grad_()
    heard = torch.randn(5, 3).softmax(dim=1)
    (slope,) = torch.autograd.grad(KTpFL(public="p").lesson(heard.double(), logits), logits)
    torch.testing.assert_close(slope, (logits.softmax(dim=1) - heard.double()).detach() / 5, atol=1e-6, rtol=0)
    (slope,) = torch.autograd.grad(FedDF(public="p").lesson(logits.detach(), logits), logits)
    assert float(slope.abs().max()) < 1e-7
    assert float(FedMD(public="p").lesson(logits.detach() + 0.5, logits).detach()) == pytest.approx(0.5)
    # Sharpened by T = 0.1, the mean (0.6, 0.4) is the softmax of (6, 4).
    (slope,) = torch.autograd.grad(
        DSFL(public="p").lesson(torch.tensor([[0.6, 0.4]]), two := torch.zeros(1, 2, requires_grad=True)), two
    )
    assert slope[0, 0].item() == pytest.approx(0.5 - 1 / (1 + np.exp(-2.0)), abs=1e-6)


# -- the learnt mixture -----------------------------------------------------------------------------------------------


def info(present: tuple[bool, ...]) -> RoundInfo:
    names = tuple("abc"[: len(present)])
    return RoundInfo(names, np.ones(len(present)), present)


def three(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return [{"public.values": torch.randn(7, 4).mul(2).softmax(dim=1)} for _ in range(3)]


def test_the_slope_of_the_coefficients_is_autograds() -> None:
    said = torch.stack([state["public.values"] for state in three()]).double()
    rows = torch.rand(3, 3, dtype=torch.float64)
    rows = (rows / rows.sum(dim=1, keepdim=True)).requires_grad_()
    teachers = torch.einsum("kl,lnc->knc", rows, said)
    loss = (teachers * (teachers / said).log()).sum(dim=2).mean(dim=1).sum()
    (expected,) = torch.autograd.grad(loss, rows)
    found = torch.from_numpy(divergence_slope(rows.detach().numpy(), said.numpy()))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("value", [1e18, -1e18])
def test_a_hospital_s_enormous_probabilities_leave_coefficients_mixtures(value: float) -> None:
    """As large as an update may be; they ended the job with an IndexError."""
    assert np.allclose(on_simplex(np.array([1e20, -1e20, 3.0])), [1, 0, 0])
    first, *others = three()
    mixer = KnowledgeTransfer()
    for _ in range(2):
        states = [{key: torch.full_like(tensor, value) for key, tensor in first.items()}, *others]
        _, matrix = mixer.mix(states, info((True, True, True)))
        assert np.allclose(matrix.sum(axis=1), 1) and (matrix >= 0).all()


def test_coefficients_stay_mixtures() -> None:
    assert np.allclose(on_simplex(np.array([0.2, 0.3, 0.5])), [0.2, 0.3, 0.5])
    assert np.allclose(on_simplex(np.array([2.0, 0.0, 0.0])), [1, 0, 0])
    assert np.allclose(on_simplex(np.array([0.5, 0.5, -1.0])), [0.5, 0.5, 0])
    here = info((True, True, True))
    still, learning = KnowledgeTransfer(eta=0.0), KnowledgeTransfer(eta=0.5, rho=0.0)
    mixed, matrix = still.mix(three(), here)
    uniform, _ = Mean(uniform=True).mix(three(), here)
    assert np.allclose(matrix, 1 / 3)
    torch.testing.assert_close(mixed[0]["public.values"], uniform[0]["public.values"])
    for _ in range(60):
        mixed, matrix = learning.mix(three(), here)
        assert np.allclose(matrix.sum(axis=1), 1) and (matrix >= 0).all()
        for state in mixed:
            torch.testing.assert_close(state["public.values"].sum(dim=1), torch.ones(7))
    assert (matrix.diagonal() > 0.98).all()  # without the penalty each hospital is its own best teacher
    held_back = KnowledgeTransfer(eta=0.1, rho=5.0)
    for _ in range(60):
        _, matrix = held_back.mix(three(), here)
    assert (matrix.diagonal() < 0.5).all() and (matrix.diagonal() > 1 / 3).all()


def test_an_absent_hospital_is_nobodys_teacher_and_changes_no_coefficient() -> None:
    mixer = KnowledgeTransfer(eta=0.5)
    _, before = mixer.mix(three(), info((True, True, True)))
    states = three(1)
    states[1]["public.values"].fill_(0)
    mixed, applied = mixer.mix(states, info((True, False, True)))
    assert (applied[:, 1] == 0).all() and np.allclose(applied.sum(axis=1), 1)
    torch.testing.assert_close(mixed[1]["public.values"].sum(dim=1), torch.ones(7))
    assert np.allclose(mixer.state()["coefficients"], before)
    again = KnowledgeTransfer(eta=0.5)
    again.load_state(mixer.state())
    here = info((True, True, True))
    assert np.array_equal(again.mix(three(2), here)[1], mixer.mix(three(2), here)[1])


# -- the public data --------------------------------------------------------------------------------------------------


def test_hospitals_with_other_public_data_take_no_part(sites: dict[str, Path], tmp_path: Path) -> None:
    write_images(tmp_path / "own", count=20)
    write_images(tmp_path / "shared", count=15)
    files = {**sites, "carla": write_declared(tmp_path, "own", "shared")}
    coordinator, _ = begin(job(FedMD), files, tmp_path / "run")
    assert coordinator.joined == ["anna", "berta"]
    (event,) = coordinator.record.events
    assert "carla has dataset 'shared' of 15 samples of SHA-256" in event.event
    assert "anna has dataset 'shared' of 14 samples" in event.event


def test_public_data_that_cannot_be_used(sites: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SiteFileError, match="asks for dataset 'other', which this hospital does not declare"):
        method: Method = FedMD(public="other")
        begin(Job("small", 1, Settings(rounds=1, references=()), {}, method, TASK), sites, tmp_path)
    write_images(tmp_path / "own", count=20)
    write_images(tmp_path / "shared")
    with pytest.raises(DataError, match="label"):
        file = write_declared(tmp_path, "own", "shared", label=None)
        begin(job(FedMD), {"anna": on_its_own(file)}, tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedMD(public="p", distill_epochs=0), "FedMD's distill_epochs must be at least 1, got 0"),
        (lambda: DSFL(public="p", temperature=0.0), "temperature must be above 0, got 0"),
        (lambda: KnowledgeTransfer(eta=-1.0), "eta must be at least 0, got -1"),
        (lambda: KnowledgeTransfer(rho=-0.5), "rho must be at least 0, got -0.5"),
        (
            lambda: build({"path": "medpfl.methods.fedmd.FedMD"}, Method, "here"),
            "'public' of FedMD is missing",
        ),
    ],
)
def test_arguments_out_of_range(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("method", METHODS)
def test_as_configuration(method: type[OnPublicData]) -> None:
    made = method(public="shared")
    assert build(spec_of(made), Method, "here") == made


def test_public_tables_have_the_hospitals_own_columns(table_sites: dict[str, Path]) -> None:
    """Of equal width, they would be given to the network with other values at each input."""
    content = yaml.safe_load(table_sites["anna"].read_text())
    shared = {**content["datasets"]["blood"], "public": True, "features": {"b": "number", "a": "number", "c": "number"}}
    content["datasets"]["shared"] = shared
    table_sites["anna"].write_text(yaml.safe_dump(content, sort_keys=False))
    site, task = load_site_file(table_sites["anna"]), Tabular("blood")
    data = task.load(site)
    with pytest.raises(DataError, match="the public dataset 'shared': its input 1 is 'b: number', own 'a: number'"):
        read_common(FedMD(public="shared", batch_size=8), task, site, data.input_shape, data)
