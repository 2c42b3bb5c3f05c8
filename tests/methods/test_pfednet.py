# SPDX-License-Identifier: Apache-2.0
"""Oracles of pFedNet: its special cases, the sketches that leave a hospital, and Algorithm 5's exchanges."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baselines import Normed, assert_resumes, begin, held, play, same, served
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, Mixer, NetworkProx
from medpfl.job import Job
from medpfl.methods.fedper import FedPer
from medpfl.methods.fedprox import FedProx
from medpfl.methods.pfednet import PFedNet
from medpfl.rounds.messages import Message
from tools import exchange, run

Make = Callable[..., Job]
HEAD = ["2.weight", "2.bias"]  # of the small tables' perceptron


def job(make_job: Make, prox: NetworkProx, shared: bool = True, rounds: int = 3, **args: Any) -> Job:
    mixers: dict[str, Mixer] = {"shared": Mean(uniform=True)} if shared else {}
    return make_job(rounds=rounds, mixers={**mixers, "personal": prox}, method=PFedNet(lr=0.05, batch_size=8, **args))


@pytest.mark.slow
@pytest.mark.parametrize("prox", [NetworkProx(tau=0.0, graph="complete"), NetworkProx(tau=9.0, graph="empty")])
def test_without_attraction_it_is_fedper(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, prox: NetworkProx
) -> None:
    coordinator, runners = begin(job(make_job, prox), table_sites, tmp_path / "a")
    fedper = make_job(mixers={"model": Mean(uniform=True)}, method=FedPer(lr=0.05, batch_size=8))
    other, its_runners = begin(fedper, table_sites, tmp_path / "b")
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        play(other, its_runners, number)
    for site in runners:
        assert same(held(runners[site], "model"), held(its_runners[site], "model"))


@pytest.mark.slow
def test_all_personal_and_drawn_hard_it_is_fedavg(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    ring = (("anna", "berta"), ("berta", "clara"), ("clara", "dora"))
    prox = NetworkProx(tau=1e4, graph="given", edges=ring)
    coordinator, runners = begin(job(make_job, prox, shared=False, personal=("",)), table_sites, tmp_path / "a")
    fedavg = make_job(mixers={"model": Mean(uniform=True)}, method=FedProx(lr=0.05, batch_size=8, mu=0.0))
    other, its_runners = begin(fedavg, table_sites, tmp_path / "b")
    for number in (1, 2):
        play(coordinator, runners, number)
        play(other, its_runners, number)
    for site in runners:
        ours, theirs = served(coordinator, "personal", site), served(other, "model", site)
        assert ours.keys() == theirs.keys()
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("args", "personal"),
    [
        ({}, HEAD),
        ({"personal": ("0",)}, ["0.weight", "0.bias"]),
        ({"personal_types": ("BatchNorm1d",)}, [f"1.{k}" for k in
          ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]),
        ({"personal": ("0",), "personal_types": ("Linear",)}, ["0.weight", "0.bias", "3.weight", "3.bias"]),
    ],
)  # fmt: skip
def test_the_personal_part_by_path_or_type(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, args: dict[str, Any], personal: list[str]
) -> None:
    task = Normed(dataset="blood") if "personal_types" in args else None
    mixers = {"shared": Mean(), "personal": NetworkProx(tau=1.0, graph="complete")}
    coordinator, runners = begin(make_job(mixers=mixers, method=PFedNet(**args), task=task), table_sites, tmp_path)
    sent = play(coordinator, runners, 1)["anna"]
    assert [key.removeprefix("model.") for key in sent["personal"]] == personal
    assert len(sent["personal"]) + len(sent["shared"]) == len(held(runners["anna"], "model"))


@pytest.mark.parametrize("sketch", ["moments", "covariance", "labels"])
def test_the_sketch_is_of_the_data_as_they_were(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, sketch: Any
) -> None:
    prox = NetworkProx(tau=0.5, neighbours=1, sketch=sketch)
    coordinator, runners = begin(job(make_job, prox), table_sites, tmp_path)
    replies = exchange(runners, coordinator.rounds.statistics_messages(1, coordinator.joined))
    for site, runner in runners.items():
        told = replies[site].slots[sketch]
        split = runner.data.splits["train"]
        scale, mean = (np.array(getattr(runner.data.preparation, key)) for key in ("scale", "mean"))
        rows = split.inputs[:].double().numpy() * scale + mean  # the columns as in the file, not standardised
        assert rows.mean(axis=0)[0] == pytest.approx(0.3 * list(runners).index(site), abs=0.45)
        expected = {
            "mean": rows.mean(axis=0), "variance": rows.var(axis=0), "covariance": np.cov(rows.T, bias=True),
            "histogram": np.bincount(split.targets[:].numpy(), minlength=2) / len(split),
        }  # fmt: skip
        assert set(told) == {"moments": {"mean", "variance"}, "covariance": {"mean", "covariance"},
                             "labels": {"histogram"}}[sketch]  # fmt: skip
        for key, value in told.items():
            np.testing.assert_allclose(value.numpy(), expected[key], atol=1e-5)
    coordinator.rounds.take_statistics(1, replies)
    assert coordinator.rounds.statistics_messages(2, coordinator.joined) == {}


@pytest.mark.slow
def test_neighbours_are_drawn_together_and_others_are_not(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    prox = NetworkProx(tau=0.05, neighbours=1)  # anna and berta are alike, and clara and dora (or all in a row)
    run(job(make_job, prox), table_sites, tmp_path)
    with np.load(tmp_path / "results" / "mixing.npz") as stored:
        matrix, mean = stored["personal/00001"], stored["shared/00001"]
    edges = prox.network(("anna", "berta", "clara", "dora"))
    assert 2 <= len(edges) <= 3
    near = np.eye(4)
    near[edges[:, 0], edges[:, 1]] = near[edges[:, 1], edges[:, 0]] = 1
    reach = np.linalg.matrix_power(near, 4) > 0  # a diffusion reaches everybody in its part of the graph
    np.testing.assert_array_equal(matrix > 1e-9, reach)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
    np.testing.assert_allclose(mean, 0.25)


def test_algorithm_5_exchanges_one_part_at_a_time(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    prox = NetworkProx(tau=0.02, graph="complete")
    coordinator, runners = begin(job(make_job, prox, alternate=(3, 2), steps=2), table_sites, tmp_path)
    before = served(coordinator, "shared")
    play(coordinator, runners, 1)  # the personal part only
    for key, value in served(coordinator, "shared").items():
        torch.testing.assert_close(value, before[key], atol=1e-6, rtol=0)
    assert coordinator.rounds.refine_messages() == {} and coordinator.done == 1
    heads = {site: held(runner, "model") for site, runner in runners.items()}
    assert any(not torch.equal(heads["anna"][key], heads["berta"][key]) for key in HEAD)
    play(coordinator, runners, 2)  # and after the second exchange of it, the shared part three times
    seen = []
    while messages := coordinator.rounds.refine_messages():
        assert all(list(message.slots) == ["shared", "personal"] for message in messages.values())
        heads = {site: served(coordinator, "personal", site) for site in runners}  # fixed as the server mixed them
        replies: dict[str, Message] = exchange(runners, messages)
        for site, runner in runners.items():
            now = held(runner, "model")
            assert all(torch.equal(now[key], heads[site][key]) for key in HEAD)
            assert not torch.equal(now["0.weight"], messages[site].slots["shared"]["model.0.weight"])
        assert all(list(reply.slots) == ["shared"] for reply in replies.values())
        seen.append(replies["anna"].slots["shared"]["model.0.weight"].clone())
        mean = torch.stack([reply.slots["shared"]["model.0.weight"] for reply in replies.values()]).mean(dim=0)
        coordinator.rounds.take_refined(replies)
        torch.testing.assert_close(served(coordinator, "shared")["0.weight"], mean, atol=1e-6, rtol=0)
    assert len(seen) == 3 and coordinator.done == 2


def test_a_job_that_never_trains_the_shared_part_is_refused(make_job: Make) -> None:
    """It stayed at its random initial weights, in silence."""
    prox = NetworkProx(tau=0.02, graph="complete")
    job(make_job, prox, rounds=4, alternate=(3, 4))
    with pytest.raises(ConfigError, match=r"alternate is \[3, 4\], and the job has 3 rounds: the shared part is"):
        job(make_job, prox, rounds=3, alternate=(3, 4))


def test_what_is_fixed_keeps_its_batchnorm_statistics(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    mixers = {"shared": Mean(), "personal": NetworkProx(tau=1.0, graph="complete")}
    method = PFedNet(alternate=(1, 1))
    coordinator, runners = begin(
        make_job(mixers=mixers, method=method, task=Normed(dataset="blood")), table_sites, tmp_path
    )
    before = held(runners["anna"], "model")
    play(coordinator, runners, 1)
    after = held(runners["anna"], "model")
    assert all(torch.equal(before[key], after[key]) for key in before if key not in ("3.weight", "3.bias"))
    exchange(runners, coordinator.rounds.refine_messages())
    assert not torch.equal(held(runners["anna"], "model")["1.running_mean"], before["1.running_mean"])


@pytest.mark.parametrize("alternate", [None, (2, 2)])
@pytest.mark.slow
def test_resuming_keeps_the_graph_and_what_was_sent(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, alternate: Any
) -> None:
    def make() -> Job:
        return job(make_job, NetworkProx(tau=0.05, s=0.5, neighbours=1), rounds=4, alternate=alternate)

    assert_resumes(make, table_sites, tmp_path)


def test_resuming_keeps_the_statistics_that_an_exchange_within_a_round_has_moved(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """They are private, and were kept as they were before that exchange."""

    def make() -> Job:
        method = PFedNet(lr=0.05, batch_size=8, alternate=(1, 1), local_statistics=True)
        slots = {"shared": Mean(uniform=True), "personal": NetworkProx(tau=0.05, neighbours=1)}
        return make_job(rounds=4, mixers=slots, method=method, task=Normed(dataset="blood"))

    assert_resumes(make, table_sites, tmp_path)


def test_the_graph_costs_one_small_message(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(job(make_job, NetworkProx(tau=0.05, neighbours=2)), table_sites, tmp_path)
    traffic = json.loads((tmp_path / "results" / "bytes.json").read_text())
    sketches = [line for line in traffic if line["round"] == 0 and line["direction"] == "from_site"]
    assert [line["raw"] for line in sketches] == [2 * 3 * 8] * 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"alternate": (0, 1)}, r"alternate must be two whole numbers from 1, got \[0, 1\]"),
        ({"personal_types": ("Lineal",)}, "torch.nn has no module class 'Lineal'"),
        ({"personal_types": ("BatchNorm1d",)}, "found no BatchNorm1d layer"),
        ({"personal": ("head",)}, "no module 'model.head'"),
        ({"personal": ("",), "alternate": (1, 1)}, "cannot alternate where everything is personal"),
    ],
)
def test_bad_arguments_get_a_sentence(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, args: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        begin(job(make_job, NetworkProx(tau=1.0, graph="complete"), **args), table_sites, tmp_path)
