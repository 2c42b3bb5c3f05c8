# SPDX-License-Identifier: Apache-2.0
"""CusFL's invariants: the teacher stands still and hears nothing, the head never travels, r = 0 is local training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baselines import assert_resumes, begin, held, play, same, served
from medpfl import store
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, MeanOfLatest
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.job.settings import Settings as JobSettings
from medpfl.methods.contract import Batch
from medpfl.methods.cusfl import CusFL, Guide, pooled, similarity_loss, spread, weight_for
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.privacy import DPSGD
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks import Classification, Segmentation
from medpfl.tasks.contract import Task
from one_slot import OneSlot
from pictures import TABLE, declare, write_images
from small_cusfl import on_tables
from small_jobs import on_its_own
from tools import Make, run

CLASSES = Classification("skin", size=(32, 32), architecture=ResNet(width=4, depth=10, pool=False))
MASKS = Segmentation("skin", size=(32, 32), architecture=UNet((4, 8, 8)))
TASKS = pytest.mark.parametrize("task", [CLASSES, MASKS], ids=["classification", "segmentation"])


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    files = {}
    for name, count in (("anna", 24), ("berta", 18)):
        folder = tmp_path_factory.mktemp(name)
        write_images(folder, count=count)
        files[name] = declare(folder, TABLE)
    return files


def job(task: Task = CLASSES, rounds: int = 2, references: bool = False, **method: Any) -> Job:
    chosen = CusFL(**{"batch_size": 6, "projection": 8, **method})
    settings = JobSettings(rounds=rounds, references=("local",) if references else (), finetune=0)
    return Job("small", 1, settings, {}, chosen, task)


def teacher_of(runner: SiteRunner) -> Guide:
    teacher = runner.models["federated"]
    assert isinstance(teacher, Guide)
    return teacher


def trained(runner: SiteRunner) -> dict[str, Tensor]:
    """The hospital's own f and g under the slot's names."""
    state = runner.models.state_dict()
    own = {}
    for key in teacher_of(runner).state_dict():
        mine = key.replace("extractor.network.", "personal.", 1) if key.startswith("extractor") else key
        own[key] = state[mine].clone()
    return own


# -- the loss ---------------------------------------------------------------------------------------------------------

Values = st.floats(-10, 10, width=32)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(Values, min_size=12, max_size=12), st.floats(0.125, 64, width=32))
def test_similarity_is_in_0_2_and_blind_to_scale(values: list[float], scale: float) -> None:
    one, other = torch.tensor(values).reshape(2, 2, 3)
    found = similarity_loss(one, other)
    assert -1e-6 <= float(found) <= 2 + 1e-6
    if min(one.norm(dim=1).min(), other.norm(dim=1).min()) > 1e-3:
        assert float(similarity_loss(scale * one, other)) == pytest.approx(float(found), abs=1e-5)
        assert float(similarity_loss(one, scale * other)) == pytest.approx(float(found), abs=1e-5)
        assert float(similarity_loss(one, one)) == pytest.approx(0, abs=1e-6)
        assert float(similarity_loss(one, -one)) == pytest.approx(2, abs=1e-6)


@pytest.mark.slow
@settings(deadline=None)
@given(st.floats(0, 0.95), st.floats(1e-3, 10), st.floats(1e-3, 2))
def test_the_weight_realises_the_ratio(ratio: float, task: float, aligned: float) -> None:
    weight = weight_for(ratio, torch.tensor(task), torch.tensor(aligned), cap=float("inf"))
    share = float(weight) * aligned
    assert share / (task + share) == pytest.approx(ratio, abs=1e-5)
    assert float(weight_for(ratio, torch.tensor(task), torch.tensor(aligned), cap=0.5)) <= 0.5


@pytest.mark.parametrize("aligned", [0.0, -1e-7, 1e-9])
def test_the_weight_stays_finite_where_nothing_is_to_align(aligned: float) -> None:
    given_ = torch.tensor(aligned, requires_grad=True)
    weight = weight_for(0.5, torch.tensor(0.7), given_, cap=10)
    assert float(weight) == 10 and not weight.requires_grad


def test_spread_tells_a_collapsed_projection() -> None:
    one = torch.tensor([0.3, -2.0, 1.0])
    assert float(spread(torch.stack([one, 5 * one, 0.1 * one]))) == pytest.approx(0, abs=1e-6)
    assert float(spread(torch.eye(4) * torch.tensor([1.0, 2.0, 3.0, 4.0]))) == pytest.approx(3 / 4)
    assert float(spread(torch.stack([one, -one]))) == pytest.approx(1)


# -- one batch --------------------------------------------------------------------------------------------------------


def gradients(runner: SiteRunner, method: CusFL, ratio: float) -> dict[str, Tensor | None]:
    """Of all parameters, after one batch; the networks are then as they were."""
    runner.run.optimizers = {}
    before = {key: tensor.clone() for key, tensor in runner.models.state_dict().items()}
    site = runner.rounds.site(method, 1)
    runner.models.zero_grad(set_to_none=True)
    runner.models.train()
    runner.models["federated"].eval().requires_grad_(not method.frozen)
    batch = next(iter(site.training_batches()))
    method._step(site, Batch(batch.inputs, batch.targets), ratio)
    found = {key: p.grad for key, p in runner.models.named_parameters()}
    runner.models.load_state_dict(before)
    return found


@TASKS
@pytest.mark.slow
@pytest.mark.convolutions
def test_who_hears_what(task: Task, sites: dict[str, Path], tmp_path: Path) -> None:
    """f both losses, h the task's only, g the alignment's only, xi none."""
    given_ = job(task)
    assert isinstance(given_.method, CusFL)
    _, runners = begin(given_, sites, tmp_path)
    runner = runners["anna"]
    alone, taught = (gradients(runner, given_.method, ratio) for ratio in (0.0, 0.5))
    inside = {f"personal.{k.removeprefix('extractor.network.')}" for k in teacher_of(runner).state_dict()}
    f = [key for key in alone if key in inside]
    h = [key for key in alone if key.startswith("personal.") and key not in inside]
    assert f and h
    for key in h:
        assert torch.equal(alone[key], taught[key]), key  # type: ignore[arg-type]
    assert any(not torch.equal(alone[key], taught[key]) for key in f)  # type: ignore[arg-type]
    for key in alone:
        if key.startswith("projection."):
            assert alone[key] is None and taught[key] is not None
        if key.startswith("federated."):
            assert alone[key] is None and taught[key] is None


@TASKS
@pytest.mark.slow
def test_the_teacher_stands_still(task: Task, sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begin(job(task), sites, tmp_path)
    for number in (1, 2):
        before = served(coordinator, "federated")
        sent = play(coordinator, runners, number)
        for site, runner in runners.items():
            assert same(held(runner, "federated"), before)  # weights and running statistics
            own = {f"federated.{key}": value for key, value in trained(runner).items()}
            assert same(sent[site]["federated"], own)
            moved = [key for key, value in own.items() if not torch.equal(value, before[key.partition(".")[2]])]
            assert moved


@pytest.mark.slow
def test_a_teacher_that_is_not_frozen_moves_but_is_not_sent(sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begin(job(frozen=False), sites, tmp_path)
    before = served(coordinator, "federated")
    sent = play(coordinator, runners, 1)["anna"]["federated"]
    after = held(runners["anna"], "federated")
    assert not same(after, before)
    assert all(torch.equal(after[key], before[key]) for key in before if "running" in key)
    assert same(sent, {f"federated.{key}": value for key, value in trained(runners["anna"]).items()})


# -- rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [{"ratio": 0.0}, {"aligned_rounds": 0}, {"ratios": {"anna": 0.0, "berta": 0.0}}])
@TASKS
@pytest.mark.slow
def test_without_alignment_it_is_local_training(
    task: Task, method: dict[str, Any], sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(job(task, references=True, **method), sites, tmp_path)
    for number in (1, 2):
        play(coordinator, runners, number)
        for runner in runners.values():
            assert same(held(runner, "personal"), held(runner, "local"))


def test_every_hospital_may_choose_its_ratio(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    given_ = on_tables(make_job, ratios={"anna": 0.0})
    given_ = Job("small", 2, JobSettings(rounds=4, references=("local",), finetune=0),
                 {}, given_.method, given_.task)  # fmt: skip
    coordinator, runners = begin(given_, table_sites, tmp_path)
    play(coordinator, runners, 1)
    equal = {site for site, runner in runners.items() if same(held(runner, "personal"), held(runner, "local"))}
    assert equal == {"anna"}


@pytest.mark.slow
def test_fine_tuning_afterwards_is_local(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begin(on_tables(make_job, aligned_rounds=1), table_sites, tmp_path)
    ratios = []
    for number in (1, 2):
        play(coordinator, runners, number)
        ratios.append(float(runners["anna"].models["alignment"].get_buffer("ratio")))
    assert ratios[0] > 0 and ratios[1] == 0


@pytest.mark.slow
def test_the_federated_model_is_the_mean(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begin(on_tables(make_job), table_sites, tmp_path)
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        own = [trained(runner) for runner in runners.values()]
        for key, value in served(coordinator, "federated").items():
            if value.is_floating_point():
                torch.testing.assert_close(value, torch.stack([s[key] for s in own]).mean(dim=0), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_one_hospital_is_its_own_teacher(sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begin(job(), {"anna": on_its_own(sites["anna"])}, tmp_path)
    for number in (1, 2):
        play(coordinator, runners, number)
        assert same(served(coordinator, "federated"), trained(runners["anna"]))


def test_equal_hospitals_stay_equal(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Up to the order of a batch, which is each hospital's own. SGD, because Adam blows up gradients of rounding."""
    twins = {"anna": table_sites["anna"], "berta": tmp_path / "berta.yaml"}
    twins["berta"].write_text(table_sites["anna"].read_text().replace("site: anna", "site: berta"))
    (tmp_path / "anna.csv").write_bytes((table_sites["anna"].parent / "anna.csv").read_bytes())
    coordinator, runners = begin(on_tables(make_job, batch_size=100, optimizer="sgd"), twins, tmp_path)
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        for key, value in trained(runners["anna"]).items():
            torch.testing.assert_close(value, trained(runners["berta"])[key], atol=1e-4, rtol=0)
            torch.testing.assert_close(served(coordinator, "federated")[key], value, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_absent_hospitals_follow_equation_5(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """xi + 1/N sum of what each own model moved by; who is absent moved by nothing."""
    coordinator, runners = begin(on_tables(make_job), table_sites, tmp_path)
    everybody = list(coordinator.roster)
    for number, present in ((1, everybody), (2, everybody[1:]), (3, everybody[:2]), (4, everybody)):
        xi = served(coordinator, "federated")
        before = {site: trained(runners[site]) for site in everybody}
        play(coordinator, runners, number, present)
        for key, value in served(coordinator, "federated").items():
            if value.is_floating_point():
                steps = [trained(runners[site])[key] - before[site][key] for site in everybody]
                torch.testing.assert_close(value, xi[key] + torch.stack(steps).mean(dim=0), atol=1e-5, rtol=0)
        for site in set(everybody) - set(present):
            assert same(before[site], trained(runners[site]))


@pytest.mark.parametrize(
    "method",
    [{}, {"alignment": "contrastive"}, {"projection": None}, {"frozen": False}, {"teacher": "trained", "warm_up": 2}],
)
@pytest.mark.slow
def test_resuming(method: dict[str, Any], make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: on_tables(make_job, **method), table_sites, tmp_path)


def test_the_contrastive_loss_knows_the_last_model(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(on_tables(make_job, alignment="contrastive"), table_sites, tmp_path)
    play(coordinator, runners, 1)
    for runner in runners.values():
        assert same(held(runner, "previous"), trained(runner))
    sent = play(coordinator, runners, 2)
    assert all(key.startswith("federated.") for slot in sent["anna"].values() for key in slot)


@pytest.mark.slow
def test_the_realised_ratio_is_in_the_metrics(sites: dict[str, Path], tmp_path: Path) -> None:
    result = run(job(rounds=3, ratio=0.25, cap=1e6), sites, tmp_path)
    lines = [line for line in result["scores"] if line["model"] == "alignment_ratio"]
    assert len(lines) == 6
    assert all(line["metrics"]["alignment_ratio"] == pytest.approx(0.25, abs=1e-4) for line in lines)
    spreads = [line["metrics"]["alignment_spread"] for line in result["scores"] if line["model"] == "alignment_spread"]
    assert len(spreads) == 6 and all(0 <= value <= 1 for value in spreads)
    capped = run(job(rounds=3, ratio=0.25, cap=1e-3), sites, tmp_path / "capped")
    weights = [line["metrics"]["alignment_weight"] for line in capped["scores"] if line["model"] == "alignment_weight"]
    assert weights == [pytest.approx(1e-3)] * 6


@TASKS
@pytest.mark.slow
def test_the_personal_network_alone_predicts(task: Task, sites: dict[str, Path], tmp_path: Path) -> None:
    run(job(task), sites, tmp_path)
    path = tmp_path / "home" / "anna" / "small" / "models" / "personal-last.safetensors"
    model = load_deployed(path)
    assert list(model.networks) == ["personal"]  # neither teacher nor projection
    assert {key.partition(".")[0] for key in store.read(path)[0]} == {"personal"}
    export(path, tmp_path / "exported", "torchscript")  # checks its own outputs


# -- the server -------------------------------------------------------------------------------------------------------


def states(seed: int, count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(5, generator=generator), "n": torch.tensor(k)} for k in range(count)]


@pytest.mark.parametrize("uniform", [True, False])
def test_when_all_answer_it_is_the_mean(uniform: bool) -> None:
    sizes = {"a": 3.0, "b": 1.0, "c": 2.0}
    newest, mean = (OneSlot(mixer, states(9)[0], sizes) for mixer in (MeanOfLatest(uniform), Mean(uniform)))
    for seed in (1, 2):
        expected, matrix = mean.mix(states(seed))
        got, applied = newest.mix(states(seed))
        assert applied is not None and matrix is not None and (applied == matrix).all()
        assert all(torch.equal(a[key], b[key]) for a, b in zip(got, expected, strict=True) for key in a)


def test_who_is_absent_counts_with_its_newest_model_and_who_never_joined_does_not() -> None:
    first, second, start = states(1), states(2), states(9)[0]
    server = OneSlot(MeanOfLatest(uniform=True), start, {"a": 3.0, "b": 0.0, "c": 2.0})
    got, _ = server.mix(first, [True, False, False])
    torch.testing.assert_close(got[2]["w"], (first[0]["w"] + start["w"]) / 2)
    for each in (server.restarted(MeanOfLatest(uniform=True)), server):
        got, _ = each.mix(second, [False, False, True])
        torch.testing.assert_close(got[0]["w"], (first[0]["w"] + second[2]["w"]) / 2)


@pytest.mark.parametrize(("uniform", "shares"), [(True, (1, 1, 1)), (False, (3, 1, 2))])
def test_who_is_not_there_when_a_run_goes_on_counts_with_its_newest_model(
    uniform: bool, shares: tuple[int, ...]
) -> None:
    """It was left out as if it had never joined: the job that goes on has no first message of it."""
    first, second = states(1), states(2)
    server = OneSlot(MeanOfLatest(uniform=uniform), states(9)[0], {"a": 3.0, "b": 1.0, "c": 2.0})
    server.mix(first)
    server = server.restarted(MeanOfLatest(uniform=uniform))
    server.sizes["a"] = 0.0
    for _ in range(2):
        got, _ = server.mix(second, [False, True, True])
        newest = (first[0]["w"], second[1]["w"], second[2]["w"])
        expected = sum(n * w for n, w in zip(shares, newest, strict=True)) / sum(shares)
        torch.testing.assert_close(got[0]["w"], expected)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ratio": 1.0}, r"ratio must be in \[0, 1\), got 1.0"),
        ({"ratios": {"anna": -0.1}}, r"ratio of anna must be in \[0, 1\), got -0.1"),
        ({"cap": 0.0}, "cap must be above 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"projection": 0}, "projection must be at least 1"),
        ({"aligned_rounds": -1}, "aligned_rounds must be at least 0"),
        ({"warm_up": -1}, "warm_up must be at least 0"),
        ({"teacher": "trained", "privacy": DPSGD(target_epsilon=8.0)}, "which DPSGD does not count"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CusFL(**arguments)


def test_pooling() -> None:
    assert torch.equal(pooled(torch.arange(8.0).reshape(1, 2, 2, 2)), torch.tensor([[1.5, 5.5]]))
    vectors = torch.randn(2, 3)
    assert pooled(vectors) is vectors
