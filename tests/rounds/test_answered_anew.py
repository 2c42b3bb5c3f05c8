# SPDX-License-Identifier: Apache-2.0
"""Codecs where a hospital answers with what it holds itself, whatever it was sent: nothing is counted twice."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from every_method import EVERY, write_both
from medpfl.core.codecs import CER, STC, Chain, Codec, DAdaQuant
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.contract import Method
from medpfl.methods.cusfl import CusFL
from medpfl.methods.fedsm import FedSMPersonalised
from medpfl.results.schema import Rebuild
from medpfl.rounds.coders import ServerCoder, SiteCoder
from medpfl.rounds.hospital.networks import Networks
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import InitReply, Plan, Sizes, StatisticsReply
from medpfl.rounds.protocol.requests import InitRequest, TrainRequest
from medpfl.rounds.simulate import simulate
from medpfl.tasks.metrics.measure import Measure
from tools import assert_same, pieces, ready, round_of, run

ENTRIES = 500
ANEW = {
    "CusFL": ["federated"],
    "CusFL, both taught": ["federated"],
    "FedAMP": ["anchor"],
    "FedSMPersonalised": ["personal"],
    "L2GD": ["mixed"],
    "Scaffold": ["control"],
}


class Ends:
    """Both ends of anna's connection, whose slot "model" is answered anew."""

    def __init__(self, folder: Path):
        self.folder, self.round = folder, 0
        self.start()

    def start(self) -> None:
        """New processes."""
        self.server, self.site = ServerCoder(self.folder / "server", "anna"), SiteCoder(self.folder / "anna", "anna")
        asked = InitRequest(
            job="j", rounds=99, roster=("anna",), seed=1, threads=1, slots={"model": True}, gradients=()
        )
        self.site.receive(self.server.send(Message(asked), STC(0.5)))
        plan = Plan(models=("m",), tested=("m",), numbers=(), refined=(), shown=(), steps=(0,) * 99, anew=("model",))
        reply = InitReply(
            sizes=Sizes(train=9, validation=1, test=1), config="c", common={}, buffers=(), plan=plan,
            recipe=Rebuild(method={}, task={}, input_shape=[5], preparation={}), personalised="m", score="s",
            measures={"s": Measure()}, classes=("no", "yes"), versions={},
        )  # fmt: skip
        message = Message(reply, {"model": {"w": torch.zeros(ENTRIES)}})
        self.server.receive(self.site.send(message, STC(0.5)))

    def exchange(self, sent: Tensor, answer: Tensor, codec: Codec, lost: bool = False) -> Tensor | None:
        """A round; what the server reads of the answer."""
        self.round += 1
        header = TrainRequest(run="r", round=self.round, rounds=99, best={})
        self.site.receive(self.server.send(Message(header, {"model": {"w": sent}}), STC(0.5)))
        reply = self.site.send(Message(StatisticsReply(), {"model": {"w": answer}}), codec)
        if lost:
            self.round -= 1
            return None
        read = self.server.receive(reply).slots["model"]["w"]
        found = read.clone()
        read.zero_()  # as answers are mixed in place
        return found


@pytest.mark.parametrize("codec", [STC(0.03), CER(0.5), Chain(CER(0.1), STC(0.05))], ids=repr)
def test_the_server_comes_to_know_what_a_hospital_holds(tmp_path: Path, codec: Codec) -> None:
    """A residual would be added to a difference that has it in it already: STC of 3 % ended a hundred times too far."""
    torch.manual_seed(0)
    ends, holds = Ends(tmp_path), torch.randn(ENTRIES)
    lengths = []
    for number in range(90):
        read = ends.exchange(0.5 * torch.randn(ENTRIES), holds, codec, lost=number % 7 == 3)
        if number % 10 == 5:
            ends.start()
        if read is not None:
            lengths.append(float((read - holds).norm() / holds.norm()))
    # From the second answer on (the first is a difference to what was sent) it only comes nearer, also over restarts.
    assert all(after <= before + 1e-6 for before, after in itertools.pairwise(lengths)), lengths
    assert lengths[-1] < 0.05, lengths


def test_a_server_that_lost_its_copies_begins_anew(tmp_path: Path) -> None:
    ends, holds = Ends(tmp_path), torch.randn(ENTRIES)
    for _ in range(3):
        ends.exchange(torch.zeros(ENTRIES), holds, STC(0.1))
    ends.server.forget()
    first = [ends.exchange(torch.zeros(ENTRIES), holds, STC(0.1)) for _ in range(20)]
    assert first[-1] is not None and (first[-1] - holds).norm() < 0.3 * holds.norm()


def test_what_may_lose_more_than_it_is_given_is_compared_with_what_was_sent(tmp_path: Path) -> None:
    ends, holds = Ends(tmp_path), torch.randn(ENTRIES)
    for _ in range(20):
        read = ends.exchange(holds, holds + 0.01, DAdaQuant(1))
        assert read is not None and (read - holds - 0.01).abs().max() < 0.02 + ends_differ(ends, holds)


def ends_differ(ends: Ends, holds: Tensor) -> float:
    """By how much what the hospital was sent differs from what it holds."""
    assert ends.server._held is not None
    return float((ends.server._held.reference["model::w"] - holds).abs().max())


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_both(tmp_path_factory.mktemp("sites"))[False]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if not EVERY[name].images])
def test_methods_name_the_slots_that_they_answer_anew(
    sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What is sent instead of a slot's tensors is a gradient, or what the hospital holds."""
    instead: set[str] = set()

    def seen(self: Networks, method: Method, outbox: Mapping[str, object]) -> dict[str, dict[str, Tensor]]:
        instead.update(outbox)
        return {}

    monkeypatch.setattr(Networks, "sent_instead", seen)
    coordinator, runners = pieces(EVERY[name].job(), sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    gradients = {slot for slot, mixer in coordinator.copies.mixers.items() if mixer.takes == "gradients"}
    coordinator.close()
    assert set(EVERY[name].method().anew) == set(ANEW.get(name, ())) >= instead - gradients


def test_a_personaliser_says_it_of_its_own_slots() -> None:
    method = FedSMPersonalised(personaliser=CusFL(split="2"))
    assert set(method.anew) == {"personal", "own_federated"} < set(method.components())


@pytest.mark.slow
def test_anchors_of_fedamp_stay_those_of_a_job_without_codecs(sites: dict[str, Path], tmp_path: Path) -> None:
    def job(codecs: Codecs | None) -> Job:
        return replace(EVERY["FedAMP"].job(rounds=12), codecs=codecs)

    plain = run(job(None), sites, tmp_path / "plain")["slots"]["anchor"]
    coded = run(job(Codecs(from_site=STC(0.1))), sites, tmp_path / "coded")["slots"]["anchor"]
    apart = torch.cat([(coded[key] - tensor).flatten() for key, tensor in plain.items()]).norm()
    assert apart < 0.3 * torch.cat([tensor.flatten() for tensor in plain.values()]).norm()


@pytest.mark.slow
@pytest.mark.parametrize("to_site", [None, STC(0.3)], ids=["whole", "encoded"])
def test_a_killed_job_goes_on(sites: dict[str, Path], tmp_path: Path, to_site: Codec | None) -> None:
    job = replace(EVERY["FedAMP"].job(rounds=3), codecs=Codecs(to_site, STC(0.2)))
    whole = run(job, sites, tmp_path / "whole")
    simulate(job, sites, tmp_path / "killed" / "results", tmp_path / "killed" / "home", stop_after=2)
    assert_same(run(job, sites, tmp_path / "killed"), whole)
