# SPDX-License-Identifier: Apache-2.0
"""FedAP at the hospitals: what is private, what the statistics are, its variants and ablations, and its refusals."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from baselines import assert_resumes, begin, play, served
from medpfl import store
from medpfl.core.errors import ConfigError, SiteFileError
from medpfl.core.mixers import Identity, Mean, Mixer, StatisticsDistance
from medpfl.core.similarity import distances, inverse_distance_weights
from medpfl.job import Job
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedbn import FedBN
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.tasks.tabular import Tabular
from small_jobs import write_table_sites
from tools import assert_same, exchange, normed, outcome, run

Make = Callable[..., Job]
NORM = {f"model.1.{entry}" for entry in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
TRAVELS = {"model.0.weight", "model.0.bias", "model.3.weight", "model.3.bias"}


def method(kind: Any = FedAP, **more: Any) -> Any:
    return kind(**{"lr": 0.05, "batch_size": 8, **more})


def fedap_job(make_job: Make, mixer: Mixer | None = None, **more: Any) -> Job:
    wanted = {"mixers": {"model": mixer or StatisticsDistance()}, "method": method(), "task": normed(), "rounds": 4}
    return make_job(**{**wanted, **more})


def matrices(folder: Path) -> dict[int, np.ndarray]:
    with np.load(folder / "results" / "mixing.npz") as stored:
        return {int(key.split("/")[1]): stored[key] for key in stored.files if key.startswith("model/")}


def ask(coordinator: Coordinator, runners: dict[str, SiteRunner], round_number: int = 1) -> dict[str, Any]:
    """The statistics that every hospital sends before a round; they are handed to the component."""
    replies = exchange(runners, coordinator.rounds.statistics_messages(round_number, coordinator.joined))
    coordinator.rounds.take_statistics(round_number, replies)
    return {site: reply.slots for site, reply in replies.items()}


def by_hand(runner: SiteRunner, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of what enters the layer after the first ``layers`` ones, from one pass in float64."""
    net = copy.deepcopy(runner.models["model"]).double().eval()[:layers]
    with torch.inference_mode():
        values = net(runner.data.splits["train"].inputs[:].double()).numpy()
    return values.mean(axis=0), values.var(axis=0)


@pytest.mark.parametrize(("statistics", "path", "layers"), [("batch_norm_inputs", "1", 1), ("head_inputs", "3", 3)])
@pytest.mark.slow
def test_statistics_and_weights_equal_those_made_by_hand(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, statistics: Any, path: str, layers: int
) -> None:
    """FedAP and d-FedAP without a pretrained network: features of the common initial one."""
    mixer = StatisticsDistance(lam=0.4, statistics=statistics)
    coordinator, runners = begin(fedap_job(make_job, mixer), table_sites, tmp_path)
    sent = ask(coordinator, runners)
    points = []
    for site in coordinator.roster:
        assert set(sent[site][statistics]) == {f"{path}.mean", f"{path}.variance"}
        mean, variance = by_hand(runners[site], layers)
        np.testing.assert_allclose(sent[site][statistics][f"{path}.mean"], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sent[site][statistics][f"{path}.variance"], variance, rtol=1e-5, atol=1e-6)
        points.append(np.concatenate([mean, np.sqrt(variance)]))
    distance = np.linalg.norm(np.array(points)[:, None] - np.array(points)[None], axis=2)
    info = coordinator.info(coordinator.joined)
    np.testing.assert_allclose(mixer.matrix(info), inverse_distance_weights(distance, 0.4), rtol=1e-3)


@pytest.mark.slow
def test_asking_for_statistics_changes_nothing_at_the_hospital(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(fedap_job(make_job), table_sites, tmp_path)
    before = {site: copy.deepcopy(runner.models.state_dict()) for site, runner in runners.items()}
    ask(coordinator, runners)
    for site, state in before.items():
        for key, tensor in runners[site].models.state_dict().items():
            assert torch.equal(tensor, state[key]), key


def test_batch_norm_stays_and_is_not_touched_by_mixing(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(fedap_job(make_job), table_sites, tmp_path)
    ask(coordinator, runners)
    for number in (1, 2):
        sent = play(coordinator, runners, number)
        assert all(set(answer["model"]) == TRAVELS for answer in sent.values())
        assert set(served(coordinator, "model")) == {key.partition(".")[2] for key in TRAVELS}
        before = {site: copy.deepcopy(runner.models.state_dict()) for site, runner in runners.items()}
        exchange(runners, coordinator.end.validate_messages(coordinator.joined))  # loads what was mixed
        for site, runner in runners.items():
            after = runner.models.state_dict()
            assert {key for key in after if torch.equal(after[key], before[site][key])} >= NORM
            assert not torch.equal(after["model.0.weight"], before[site]["model.0.weight"])


@pytest.mark.slow
def test_the_weights_are_made_once_and_written_down(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    run(fedap_job(make_job, StatisticsDistance(lam=0.3)), table_sites, tmp_path)
    found = matrices(tmp_path)
    assert sorted(found) == [1, 2, 3, 4] and all((found[1] == matrix).all() for matrix in found.values())
    np.testing.assert_allclose(found[1].diagonal(), 0.3)
    assert len(np.unique(found[1][0].round(6))) == 4  # no two hospitals are alike
    traffic = json.loads((tmp_path / "results" / "bytes.json").read_text())
    before = [line for line in traffic if line["round"] == 0 and line["direction"] == "from_site"]
    assert [line["raw"] for line in before] == [2 * 4 * 8] * 4  # mean and variance of four channels
    page = (tmp_path / "results" / "report.html").read_text()
    assert "Who learnt from whom" in page and page.count("anna") > 1


@pytest.mark.slow
def test_lam_one_trains_exactly_as_local(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    mixers = {"local": Identity(), "model": StatisticsDistance(lam=1.0)}
    result = run(fedap_job(make_job, mixers=mixers), table_sites, tmp_path)
    by_model: dict[str, list[Any]] = {}
    for line in result["test"]:
        by_model.setdefault(line["model"], []).append((line["site"], line["choice"], line["metrics"]))
    assert by_model["local"] == by_model["personal"]


def twins(folder: Path) -> dict[str, Path]:
    """Four hospitals with the same rows."""
    sites = write_table_sites(folder)
    for site in sites:
        (folder / f"{site}.csv").write_text((folder / "anna.csv").read_text())
    return sites


@pytest.mark.slow
def test_identical_statistics_with_lam_one_over_n_are_fedbn(make_job: Make, tmp_path: Path) -> None:
    sites = twins(tmp_path / "sites")
    found = run(fedap_job(make_job, StatisticsDistance(lam=0.25)), sites, tmp_path / "fedap")
    fedbn = fedap_job(make_job, Mean(uniform=True), method=method(FedBN))
    assert_same(found, run(fedbn, sites, tmp_path / "fedbn"))


@pytest.mark.slow
def test_without_weighting_it_is_fedbn(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    found = run(fedap_job(make_job, Mean(uniform=True)), table_sites, tmp_path / "fedap")
    fedbn = fedap_job(make_job, Mean(uniform=True), method=method(FedBN))
    assert_same(found, run(fedbn, table_sites, tmp_path / "fedbn"))


def running() -> StatisticsDistance:
    return StatisticsDistance(statistics="batch_norm_running", from_round=3)


def test_a_job_that_ends_before_f_fedap_begins_is_refused(make_job: Make) -> None:
    """It was FedBN, in silence: 'medpfl job new --from ffedap_skin --rounds 20', say."""
    fedap_job(make_job, running(), rounds=3)
    with pytest.raises(ConfigError, match=r"from_round is 3, and the job has 2 rounds: all .* FedBN's; .* here 2$"):
        fedap_job(make_job, running(), rounds=2)


@pytest.mark.slow
def test_f_fedap_is_fedbn_for_the_first_half(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    found = run(fedap_job(make_job, running()), table_sites, tmp_path / "f")
    fedbn = run(fedap_job(make_job, Mean(uniform=True), method=method(FedBN)), table_sites, tmp_path / "fedbn")

    def scores(result: dict[str, Any]) -> list[Any]:
        return [line for line in result["scores"] if line["split"] == "validation" and line["round"] <= 2]

    assert scores(found) == scores(fedbn) and len(scores(found)) == 2 * 5  # four hospitals and their mean
    mixed = matrices(tmp_path / "f")
    assert (mixed[1] == 0.25).all() and (mixed[2] == 0.25).all()
    np.testing.assert_allclose(mixed[3].diagonal(), 0.5)
    assert (mixed[3] == mixed[4]).all()


def test_f_fedap_compares_the_running_statistics(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    mixer = running()
    coordinator, runners = begin(fedap_job(make_job, mixer), table_sites, tmp_path)
    assert not coordinator.rounds.statistics_messages(1, coordinator.joined)
    for number in (1, 2):
        play(coordinator, runners, number)
    held = []
    for site in coordinator.roster:
        state = runners[site].models.state_dict()
        entry = {"1.mean": state["model.1.running_mean"], "1.variance": state["model.1.running_var"]}
        held.append({key: tensor.clone() for key, tensor in entry.items()})
    ask(coordinator, runners, 3)
    expected = inverse_distance_weights(distances(held), 0.5)
    np.testing.assert_array_equal(mixer.matrix(coordinator.info(coordinator.joined)), expected)


@pytest.mark.parametrize("make_mixer", [StatisticsDistance, running])
@pytest.mark.slow
def test_it_resumes(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, make_mixer: Callable[[], Mixer]
) -> None:
    assert_resumes(lambda: fedap_job(make_job, make_mixer()), table_sites, tmp_path)


@pytest.mark.slow
def test_f_fedap_resumes_where_batch_norm_is_mixed(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The statistics are those of a hospital's own training, which the server's copy does not have."""
    shared = method(batch_norm="shared")
    assert_resumes(lambda: fedap_job(make_job, running(), method=shared), table_sites, tmp_path)


def test_a_hospital_that_is_absent_when_statistics_are_asked_for(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    mixer = StatisticsDistance(lam=0.4)
    coordinator, runners = begin(fedap_job(make_job, mixer), table_sites, tmp_path)
    messages = coordinator.rounds.statistics_messages(1, ["anna", "berta", "dora"])
    coordinator.rounds.take_statistics(1, exchange(runners, messages))
    play(coordinator, runners, 1)  # clara is back
    matrix = mixer.matrix(coordinator.info(coordinator.joined))
    np.testing.assert_allclose(matrix[2], [0.2, 0.2, 0.4, 0.2])
    assert (matrix[[0, 1, 3], 2] == 0).all() and matrix[0, 1] > 0


def test_sbn_mixes_batch_norm_too(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = fedap_job(make_job, method=method(batch_norm="shared"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    ask(coordinator, runners)
    sent = play(coordinator, runners, 1)
    assert all(set(answer["model"]) == TRAVELS | NORM for answer in sent.values())
    row = job.mixers["model"].matrix(coordinator.info(coordinator.joined))[0]
    expected = sum(
        weight * sent[site]["model"]["model.1.running_mean"].double()
        for weight, site in zip(row, coordinator.roster, strict=True)
    )
    got = served(coordinator, "model")["1.running_mean"].double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_d_fedap_needs_no_batch_norm(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    plain = Tabular(dataset="blood", hidden=(4,))
    d_fedap = StatisticsDistance(statistics="head_inputs")
    job = fedap_job(make_job, d_fedap, task=plain, method=method(batch_norm="shared"))
    run(job, table_sites, tmp_path / "d")
    assert len(np.unique(matrices(tmp_path / "d")[1][0].round(6))) == 4
    refused = fedap_job(make_job, task=plain)
    with pytest.raises(ConfigError, match="has none: take a network with BatchNorm, or d-FedAP: FedAP's batch_norm"):
        begin(refused, table_sites, tmp_path / "2")
    original = fedap_job(make_job, task=plain, method=method(batch_norm="shared"))
    coordinator, runners = begin(original, table_sites, tmp_path / "3")
    with pytest.raises(ConfigError, match=r"set the server component's statistics to 'head_inputs' \(d-FedAP\)"):
        ask(coordinator, runners)
    coordinator, runners = begin(
        fedap_job(make_job, running(), task=plain, method=method(batch_norm="shared")), table_sites, tmp_path / "4"
    )
    with pytest.raises(
        ConfigError, match=r"f-FedAP compares BatchNorm's running statistics, and the network \w+ has none"
    ):
        ask(coordinator, runners, 3)


def declare_checkpoint(sites: dict[str, Path], tensors: dict[str, torch.Tensor], kind: str = "checkpoint") -> None:
    for site, path in sites.items():
        store.save(path.with_name(f"{site}.safetensors"), tensors, {"kind": kind})
        content = yaml.safe_load(path.read_text())
        content["checkpoints"] = {"public": f"{site}.safetensors"}
        path.write_text(yaml.safe_dump(content))


def pretrained(make_job: Make, sites: dict[str, Path], folder: Path) -> dict[str, torch.Tensor]:
    """A network of the job's shapes that is not the initial one."""
    _, runners = begin(fedap_job(make_job), sites, folder)
    generator = torch.Generator().manual_seed(5)
    state = runners["anna"].models["model"].state_dict()
    return {
        key: value + torch.rand(value.shape, generator=generator) if value.is_floating_point() else value
        for key, value in state.items()
    }


def test_a_pretrained_network_gives_the_statistics_and_nothing_else(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    tensors = pretrained(make_job, table_sites, tmp_path / "first")
    declare_checkpoint(table_sites, tensors)
    job = fedap_job(make_job, method=method(pretrained="public"))
    coordinator, runners = begin(job, table_sites, tmp_path / "with")
    plain, others = begin(fedap_job(make_job), table_sites, tmp_path / "without")
    sent = ask(coordinator, runners)
    rows = runners["anna"].data.splits["train"].inputs[:]
    values = rows @ tensors["0.weight"].T + tensors["0.bias"]
    torch.testing.assert_close(
        sent["anna"]["batch_norm_inputs"]["1.mean"], values.mean(0).double(), rtol=1e-5, atol=1e-6
    )
    assert not torch.equal(
        ask(plain, others)["anna"]["batch_norm_inputs"]["1.mean"], sent["anna"]["batch_norm_inputs"]["1.mean"]
    )
    for key, tensor in runners["anna"].models.state_dict().items():
        assert torch.equal(tensor, others["anna"].models.state_dict()[key])  # both start from the job's own weights


@pytest.mark.slow
def test_hospitals_with_other_checkpoints_take_no_part(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    tensors = pretrained(make_job, table_sites, tmp_path / "first")
    declare_checkpoint(table_sites, tensors)
    changed = {**tensors, "0.bias": tensors["0.bias"] + 1e-3}
    store.save(table_sites["clara"].with_name("clara.safetensors"), changed, {"kind": "checkpoint"})
    coordinator, _ = begin(fedap_job(make_job, method=method(pretrained="public")), table_sites, tmp_path)
    assert coordinator.joined == ["anna", "berta", "dora"]
    told = [event.event for event in coordinator.record.events]
    mark = store.fingerprint(tensors)[:12]
    assert any(
        "clara has checkpoint 'public' of SHA-256" in text and f"anna has checkpoint 'public' of SHA-256 {mark}" in text
        for text in told
    )


def test_checkpoints_that_cannot_be_used(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = fedap_job(make_job, method=method(pretrained="public"))
    with pytest.raises(
        SiteFileError, match=r"asks for checkpoint 'public', which .* not declare; declared: none"
    ) as told:
        begin(job, table_sites, tmp_path)
    assert told.value.public == "checkpoint 'public' is not declared at this hospital"
    tensors = pretrained(make_job, table_sites, tmp_path / "first")
    declare_checkpoint(table_sites, tensors, kind="state")
    with pytest.raises(SiteFileError, match=r"expected a file made by 'medpfl pretrain' .*, got one of kind 'state'"):
        begin(job, table_sites, tmp_path)
    declare_checkpoint(table_sites, {**tensors, "0.bias": torch.zeros(9)})
    coordinator, runners = begin(job, table_sites, tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint 'public' does not fit the job's network: .*0\.bias"):
        ask(coordinator, runners)
    table_sites["anna"].with_name("anna.safetensors").write_bytes(b"no tensors")
    with pytest.raises(SiteFileError, match=r"checkpoint 'public': cannot read .*anna\.safetensors") as told:
        begin(job, table_sites, tmp_path)
    assert "anna" not in told.value.public


def test_another_checkpoint_is_another_run(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """An unfinished run is not taken up with weights that came from another pretrained network."""
    tensors = pretrained(make_job, table_sites, tmp_path / "first")
    job = fedap_job(make_job, method=method(pretrained="public"))
    keys = []
    for shift in (0.0, 1.0):
        declare_checkpoint(table_sites, {**tensors, "0.bias": tensors["0.bias"] + shift})
        keys.append(begin(job, table_sites, tmp_path)[0].run)
    assert keys[0] != keys[1]


@pytest.mark.slow
def test_outcome_of_the_references_does_not_change(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Local and FedAvg beside FedAP with a pretrained network are those of a job without it."""
    declare_checkpoint(table_sites, pretrained(make_job, table_sites, tmp_path / "first"))
    scores = []
    for number, chosen in enumerate((method(pretrained="public"), method())):
        mixers = {"local": Identity(), "fedavg": Mean(), "model": StatisticsDistance()}
        run(fedap_job(make_job, method=chosen, mixers=mixers), table_sites, tmp_path / str(number))
        lines = outcome(tmp_path / str(number) / "results")["test"]
        scores.append([line for line in lines if line["model"] != "personal"])
    assert scores[0] == scores[1]
