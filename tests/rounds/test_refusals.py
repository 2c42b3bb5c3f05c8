# SPDX-License-Identifier: Apache-2.0
"""What the server and the hospitals refuse of each other, in which words, and that the rest goes on."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl.core.errors import ConfigError, DataError
from medpfl.core.mixers import Identity, Mean, NetworkProx, SoftPull
from medpfl.job import Job
from medpfl.methods.pfednet import PFedNet
from medpfl.results.files import read_summary
from medpfl.results.line import MetricLine
from medpfl.rounds.messages import Message
from medpfl.rounds.pretrain import pretrain
from medpfl.rounds.server.quorum import QuorumLost
from medpfl.rounds.simulate import simulate
from medpfl.tasks.tabular import Tabular
from small_jobs import write_table_sites
from tools import exchange, normed, pieces, ready, retell, round_of

Make = Callable[..., Job]


def spoil_nan(message: Message[Any]) -> None:
    message.slots["model"]["model.0.weight"][0, 0] = float("nan")


def spoil_key(message: Message[Any]) -> None:
    message.slots["model"]["model.9.weight"] = message.slots["model"].pop("model.0.weight")


def spoil_shape(message: Message[Any]) -> None:
    message.slots["model"]["model.0.weight"] = message.slots["model"]["model.0.weight"].T.contiguous()


def spoil_type(message: Message[Any]) -> None:
    message.slots["model"]["model.0.weight"] = message.slots["model"]["model.0.weight"].double()


def spoil_slot(message: Message[Any]) -> None:
    message.slots["local"] = {"local.0.weight": torch.zeros(1)}


def spoil_metrics(message: Message[Any]) -> None:
    line = MetricLine(model="personal", split="validation", round=9, metrics={"accuracy": 1.0})
    retell(message, metrics=(line,))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_nan, "berta: entry 'model::model.0.weight' holds NaN"),
        (spoil_key, "berta: entry 'model::model.0.weight' is missing"),
        (spoil_shape, "expected shape [4, 3] torch.float32, got [3, 4]"),
        (spoil_type, "expected shape [4, 3] torch.float32, got [4, 3] torch.float64"),
        (spoil_slot, "berta: entry 'local::local.0.weight' was not asked for"),
        (spoil_metrics, "update refused: a line of 'personal' is not of the validation of round 0"),
    ],
)
@pytest.mark.slow
def test_bad_updates_are_refused_by_name_and_the_round_goes_on(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, spoil: Callable[[Message[Any]], None], words: str
) -> None:
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    ready(coordinator, runners)
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    spoil(replies["berta"])
    assert coordinator.rounds.take_train(1, replies) == ["anna", "clara", "dora"]
    assert words in coordinator.record.events[0].event
    weights = coordinator.rounds.train_messages(2, ["anna"])["anna"].slots["model"]["model.0.weight"]
    assert torch.isfinite(weights).all()
    round_of(coordinator, runners, 2)


def test_quorum_lost(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(make_job(min_clients=3), table_sites, tmp_path)
    ready(coordinator, runners)
    replies = exchange(runners, coordinator.rounds.train_messages(1, ["anna", "clara"]))
    with pytest.raises(QuorumLost, match=r"round 1: 2 of 4 .* \(anna, clara\); the job needs 3"):
        coordinator.rounds.take_train(1, replies)


def test_a_deviating_hospital_takes_no_part(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    clara = runners["clara"]
    clara._given = (clara.method, Tabular(dataset="blood", hidden=(5,)))
    ready(coordinator, runners)
    assert coordinator.joined == ["anna", "berta", "dora"]
    event = coordinator.record.events[0].event
    assert (
        "clara: entry 'fedavg::fedavg.0.bias' is [[5], 'torch.float32'], at anna it is [[4], 'torch.float32']" in event
    )


def test_other_initial_weights_take_no_part(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    messages = coordinator.init_messages()
    retell(messages["dora"], seed=77)
    coordinator.take_init(exchange(runners, messages))
    assert "dora starts from other initial weights than anna" in coordinator.record.events[0].event


def test_lam_is_refused_before_anything_starts(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"model": SoftPull(lam=0.1)})
    with pytest.raises(ConfigError, match=r"with 4 hospitals at least 0\.25, got 0\.1"):
        simulate(job, table_sites, tmp_path / "r", tmp_path / "h")


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({"model": True, "more": True}, "the server mixes slot 'more', which SoftPull does not have; its slots are: m"),
        ({}, "SoftPull has slot 'model', but the server mixes no such slot"),
    ],
)
def test_slots_of_server_and_method_must_agree(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, served: dict[str, bool], words: str
) -> None:
    """They do where both follow from one job; the server may run another one."""
    coordinator, runners = pieces(make_job(mixers={"model": Mean()}), table_sites, tmp_path)
    message = coordinator.init_messages()["anna"]
    retell(message, slots=served)
    with pytest.raises(ConfigError, match=words):
        runners["anna"].handle(message)


@pytest.mark.parametrize(
    ("mixers", "words"),
    [
        ({"models": Mean()}, "component 'models': SoftPull has no such slot; the slots are: model"),
        ({"local": Identity()}, None),
    ],
)
def test_a_component_must_have_a_slot(make_job: Make, mixers: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert list(make_job(mixers=mixers).mixers) == ["local", "model"]
        return
    with pytest.raises(ConfigError, match=words):
        make_job(mixers=mixers)


def test_a_component_for_a_slot_that_the_networks_lack_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """pFedNet whose networks are personal as a whole has nothing left for the slot "shared"."""
    mixers = {"personal": NetworkProx(tau=0.1), "shared": Mean(uniform=True)}
    job = make_job(mixers=mixers, method=PFedNet(personal=("",)))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    with pytest.raises(ConfigError) as caught:
        ready(coordinator, runners)
    assert str(caught.value) == (
        "config_fed_server.json: component 'shared' (Mean): the hospitals' networks have no such slot; they have: "
        "personal. Remove the component"
    )


@pytest.mark.slow
def test_a_slot_that_the_networks_lack_and_nobody_named_is_left_out(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(rounds=2, mixers={"personal": NetworkProx(tau=0.1)}, method=PFedNet(personal=("",)))
    simulate(job, table_sites, tmp_path / "r", tmp_path / "h", stop_after=1)
    simulate(job, table_sites, tmp_path / "r", tmp_path / "h")
    told = [event.event for event in read_summary(tmp_path / "r").events if "shared" in event.event]
    assert told == ["slot 'shared' is not mixed: the hospitals' networks have no such part; they have: personal"]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", ".hidden", "x" + "\0"])
def test_the_server_cannot_choose_a_folder(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, name: str
) -> None:
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    message = coordinator.init_messages()["anna"]
    retell(message, job=name)
    with pytest.raises(ConfigError, match="cannot be a folder"):
        runners["anna"].handle(message)


@pytest.mark.slow
def test_nothing_private_is_in_any_message(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """The local model, file names and case names stay: looked for in everything that a hospital sends."""
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    sent: list[Message[Any]] = []

    def watched(messages: Mapping[str, Message[Any]]) -> dict[str, Message[Any]]:
        replies = exchange(runners, messages)
        sent.extend(replies.values())
        return replies

    coordinator.take_init(watched(coordinator.init_messages()))
    coordinator.rounds.take_train(1, watched(coordinator.rounds.train_messages(1, coordinator.joined)))
    coordinator.end.take_validation(watched(coordinator.end.validate_messages(coordinator.joined)))
    coordinator.end.take_final(watched(coordinator.end.finish_messages(coordinator.joined)))
    for message in sent:
        assert "local" not in message.slots
        text = message.header.model_dump_json()
        assert ".csv" not in text and str(tmp_path) not in text
    with open(tmp_path / "r" / "summary.json") as file:
        assert ".csv" not in file.read()


def test_unreadable_data_stop_the_simulation_with_a_sentence(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    (table_sites["anna"].parent / "anna.csv").write_text("a,b,sick\n1,2,0\n")
    with pytest.raises(DataError, match=r"anna\.csv: column 'c' is missing"):
        simulate(make_job(), table_sites, tmp_path / "r", tmp_path / "h")


def test_too_few_hospitals(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs at least 5 hospitals, got 4"):
        simulate(replace(make_job(), min_clients=5), table_sites, tmp_path / "r", tmp_path / "h")


@pytest.mark.parametrize("name", ["mean", "server"])
def test_a_hospital_that_is_called_as_what_is_none(make_job: Make, tmp_path: Path, name: str) -> None:
    """Its scores stood among those of the hospitals' mean, or its state among the server's: the job said of itself that
    it was under way already."""
    sites = write_table_sites(tmp_path / "sites", ["anna", name])
    with pytest.raises(ConfigError, match=f"a hospital cannot be called '{name}'"):
        simulate(make_job(), sites, tmp_path / "results", tmp_path / "home")


def test_batch_norm_and_single_samples_are_told(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """It was torch's error, and a traceback."""
    method = PFedNet(batch_size=1, steps=8)
    job = make_job(mixers=method.components(), method=method, task=normed())
    with pytest.raises(ConfigError, match=r"^BatchNorm cannot train on a .* take a larger batch_size \(now 1\)"):
        simulate(job, table_sites, tmp_path / "results", tmp_path / "home")
    with pytest.raises(ConfigError, match=r"^BatchNorm cannot train on a batch of a single sample"):
        pretrain(job, table_sites, 1.0, 1)
