# SPDX-License-Identifier: Apache-2.0
"""Codecs in the exchange: both ends agree, nothing is lost for good, a killed job goes on, and bytes are counted."""

import itertools
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from every_method import EVERY, write_both
from exchanging import Asked, slots
from medpfl.core.codecs import CER, STC, Chain, Codec, DAdaQuant, Half
from medpfl.core.codecs.contract import tag_of
from medpfl.core.codecs.dadaquant import levels_over_time
from medpfl.core.codecs.progress import hospital_scales
from medpfl.core.errors import CodecError, ConfigError
from medpfl.core.mapped import is_mapped
from medpfl.core.mixers import Identity, Mean
from medpfl.deployed.model_file import Recipe
from medpfl.job import Job, load_job
from medpfl.job.codecs import Codecs
from medpfl.methods.contract import Site
from medpfl.methods.softpull import SoftPull
from medpfl.results.schema import Rebuild
from medpfl.rounds.coders import ServerCoder, SiteCoder
from medpfl.rounds.coding import PAYLOAD
from medpfl.rounds.memory import WANTED
from medpfl.rounds.messages import Message, flatten
from medpfl.rounds.protocol.replies import InitReply, Plan, Sizes, StatisticsReply, TrainReply
from medpfl.rounds.protocol.requests import EvaluateRequest, InitRequest, TrainRequest
from medpfl.rounds.protocol.text import Coded
from medpfl.tasks.metrics.measure import Measure
from tools import NormedTabular, assert_same, run, write_job

Make = Callable[..., Job]
STRONG = Codecs(STC(0.2), Chain(CER(0.1), STC(0.1)))


def messages(tmp_path: Path, gradients: tuple[str, ...] = ()) -> tuple[ServerCoder, SiteCoder, TrainRequest]:
    """Both ends of anna's connection after the init exchange of one slot "model" with a matrix and BatchNorm's mean."""
    server, site = ServerCoder(tmp_path / "server", "anna"), SiteCoder(tmp_path / "anna", "anna")
    start = {"model": {"w": torch.zeros(40, 5), "mean": torch.ones(5), "count": torch.tensor(3)}}
    asked = InitRequest(
        job="small", rounds=9, roster=("anna",), seed=1, threads=1, slots={"model": True}, gradients=gradients
    )
    site.receive(server.send(Message(asked), None))
    ready = InitReply(
        sizes=Sizes(train=9, validation=1, test=1), config="c", common={}, buffers=("mean", "count"),
        recipe=Rebuild(method={}, task={}, input_shape=[5], preparation={}), personalised="m", score="s",
        measures={"s": Measure()}, classes=("no", "yes"), versions={},
        plan=Plan(models=("m",), tested=("m",), numbers=(), refined=(), shown=(), steps=(0,) * 9),
    )  # fmt: skip
    site.keep_start(tmp_path / "start.safetensors", Message(ready, start))
    server.receive(site.send(Message(ready, start), None))
    return server, site, TrainRequest(run="r", round=1, rounds=9, best={})


def at(header: TrainRequest, number: int) -> TrainRequest:
    return header.model_copy(update={"round": number})


def model(seed: int) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(seed)
    return {"model": {"w": torch.randn(40, 5), "mean": torch.rand(5), "count": torch.tensor(seed)}}


@pytest.mark.parametrize("codec", [STC(0.1), CER(0.3), Half(), Chain(CER(0.1), STC(0.2))], ids=repr)
@pytest.mark.slow
def test_both_ends_hold_the_same_and_nothing_is_lost_for_good(tmp_path: Path, codec: Codec) -> None:
    server, site, header = messages(tmp_path)
    sent = got = torch.zeros(40, 5)
    for number in range(1, 6):
        header = at(header, number)
        travelling = server.send(Message(header, model(number)), codec)
        received = site.receive(travelling)
        assert list(travelling.slots[PAYLOAD]) == ["model"] and list(travelling.slots["model"]) == ["mean", "count"]
        assert torch.equal(received.slots["model"]["mean"], model(number)["model"]["mean"])
        assert received.slots["model"]["count"] == number and list(received.slots["model"]) == ["w", "mean", "count"]
        trained = {"model": {**model(100 + number)["model"]}}
        reply = server.receive(site.send(Message(StatisticsReply(), trained), codec))
        before = received.slots["model"]["w"]
        sent, got = sent + trained["model"]["w"] - before, got + reply.slots["model"]["w"] - before
        assert torch.equal(flatten(received.slots)["model::w"], server._held.reference["model::w"])  # type: ignore[union-attr]
    # Sattler et al.: what was sent and what is left of it are all updates together.
    torch.testing.assert_close(got + site._known[5].residual["model::w"], sent, atol=1e-4, rtol=0)
    for _ in range(60):  # a model that stays as it is reaches the hospital, however few entries a message has
        header = at(header, header.round + 1)
        received = site.receive(server.send(Message(header, model(7)), STC(0.1)))
        server.receive(site.send(Message(StatisticsReply(), received.slots), None))
    torch.testing.assert_close(received.slots["model"]["w"], model(7)["model"]["w"], atol=0.2, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [STC(0.1), Half(), Chain(CER(0.1), STC(0.2)), None], ids=repr)
def test_the_servers_references_in_files_are_those_in_memory(
    tmp_path: Path, codec: Codec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchanged(memory: str) -> list[Tensor]:
        monkeypatch.setenv(WANTED, memory)
        server, site, header = messages(tmp_path / memory)
        found = []
        for number in range(1, 4):
            travelling = server.send(Message(at(header, number), model(number)), codec)
            received = site.receive(travelling)
            if number == 2:  # this answer is lost, and the next message is a difference to what was before it
                continue
            trained = {"model": {key: tensor + 1 for key, tensor in received.slots["model"].items()}}
            reply = server.receive(site.send(Message(StatisticsReply(), trained), Half()))
            assert server._held is not None
            kept = [*server._held.reference.values(), *server._start.values()]
            assert all(map(is_mapped, kept)) == (memory == "0")
            found += [tensor for slots in (travelling.slots, reply.slots) for tensor in flatten(slots).values()] + kept
        return [tensor.clone() for tensor in found]

    in_memory, in_files = exchanged("1000"), exchanged("0")
    assert all(torch.equal(one, other) for one, other in zip(in_memory, in_files, strict=True))
    assert not list((tmp_path / "0" / "server").glob(".reference*"))


@given(st.lists(st.sampled_from(["fine", "lost down", "lost up", "nan", "late"]), max_size=12), st.booleans())
@pytest.mark.slow
def test_whatever_gets_lost_the_ends_agree(
    tmp_path_factory: pytest.TempPathFactory, fates: list[str], up: bool
) -> None:
    server, site, header = messages(tmp_path_factory.mktemp("ends"))
    late: list[Message[Any]] = []
    for number, fate in enumerate([*fates, "fine"], start=1):
        travelling = server.send(Message(at(header, number), model(number)), None if up else STC(0.1))
        if fate == "lost down":
            continue
        received = site.receive(travelling)
        if not up:
            assert torch.equal(received.slots["model"]["w"], server._pending[0].reference["model::w"])  # type: ignore[index]
        for old in late:
            with pytest.raises(CodecError, match="another message"):
                server.receive(old)
        trained = model(100 + number)
        if fate == "nan":
            trained["model"]["w"][3, 3] = torch.nan
            with pytest.raises(CodecError, match=r"slot 'model': 'w' cannot be encoded: it holds NaN"):
                site.send(Message(StatisticsReply(), trained), STC(0.1))
            continue
        reply = site.send(Message(StatisticsReply(), trained), STC(0.1))
        if fate == "late":
            late.append(reply)
        if fate == "fine":
            decoded = server.receive(reply).slots["model"]["w"]
            residual = site._known[site._now.number].residual["model::w"]  # type: ignore[union-attr]
            assert torch.isfinite(residual).all() and not torch.equal(decoded, trained["model"]["w"])


def test_gradients_have_no_reference(tmp_path: Path) -> None:
    server, site, header = messages(tmp_path, gradients=("model",))
    site.receive(server.send(Message(header, model(1)), None))
    gradient = {"model": {**model(2)["model"], "w": torch.full((40, 5), 0.5)}}
    got = server.receive(site.send(Message(StatisticsReply(), gradient), CER(0.01))).slots["model"]["w"]
    torch.testing.assert_close(got[:-1], gradient["model"]["w"][:-1], atol=1e-3, rtol=0)


class Foreign(Half):
    """Another package's, of which no receiver knows."""

    tag = "foreign"


def test_refusals_of_what_is_not_expected(tmp_path: Path) -> None:
    server, site, header = messages(tmp_path)
    with pytest.raises(CodecError, match="no codec filters, but this hospital's has"):
        site.receive(Message(header, model(1)))
    travelling = server.send(Message(header, model(1)), STC(0.1))
    strange = {**travelling.slots, PAYLOAD: {"other": torch.zeros(3, dtype=torch.uint8)}}
    other = replace(travelling, slots=strange)
    with pytest.raises(CodecError, match="slot 'other' was not expected"):
        site.receive(other)
    unknown = bytes(travelling.slots[PAYLOAD]["model"].numpy()).replace(b"stc", b"abc")
    strange = {**travelling.slots, PAYLOAD: {"model": torch.frombuffer(bytearray(unknown), dtype=torch.uint8)}}
    with pytest.raises(CodecError, match=r"anna: slot 'model': the update is encoded as 'abc' version 1, which is not"):
        site.receive(replace(travelling, slots=strange))
    site.receive(travelling)
    with pytest.raises(CodecError, match="did not pass a codec filter"):
        server.receive(Message(StatisticsReply(), model(2)))
    given = Recipe(method={}, task={}, deployed="m", classes=["no", "yes"], input_shape=[5], hospitals=2)
    evaluate = Message(EvaluateRequest(job="small", threads=1, recipe=given, sha256="s"))
    for end in (lambda: server.send(evaluate, None), lambda: site.receive(evaluate)):
        with pytest.raises(CodecError, match="anna: a request to 'evaluate' does not pass a codec filter"):
            end()
    with pytest.raises(ConfigError, match="DAdaQuant cannot encode what goes to the hospitals"):
        Codecs(to_site=DAdaQuant())
    with pytest.raises(ConfigError, match="at least one direction"):
        Codecs()
    for codecs in ((Foreign(), None), (None, Chain(Half(), Foreign()))):
        with pytest.raises(ConfigError, match=r"cannot be a job's codec: .* of 'foreign' there is none; .*, stc"):
            Codecs(*codecs)
    assert Codecs(Chain(Foreign(), Half())).to_site is not None  # whose messages are Half's


@pytest.mark.slow
def test_bytes_are_those_of_the_encoded_update(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(replace(make_job(), codecs=Codecs(None, Half())), table_sites, tmp_path)
    for line in json.loads((tmp_path / "results" / "bytes.json").read_text()):
        if line["direction"] == "from_site":
            codec_head = 4 + 1 + len("fp16") + 1 + 4
            assert line["encoded"] == line["raw"] // 2 + 2 * codec_head  # the slots "fedavg" and "model"
            assert line["ratio"] == round(line["raw"] / line["encoded"], 3)
        else:
            assert line["encoded"] == line["raw"] and line["ratio"] == 1
    assert json.loads((tmp_path / "results" / "summary.json").read_text())["codecs"]["to_site"] is None


@pytest.mark.parametrize("codecs", [STRONG, Codecs(None, DAdaQuant(4)), Codecs(Half(), None)], ids=repr)
@pytest.mark.slow
def test_a_killed_job_goes_on_as_if_nothing_had_happened(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, codecs: Codecs
) -> None:
    def job() -> Job:
        return replace(make_job(rounds=4, mixers=slots(), method=Asked(lr=0.05, batch_size=8)), codecs=codecs)

    whole = run(job(), table_sites, tmp_path / "whole")
    run_until(job(), table_sites, tmp_path / "killed", 2)
    assert_same(run(job(), table_sites, tmp_path / "killed"), whole)


@pytest.mark.slow
def test_a_codec_that_adapts_hears_of_losses_and_sizes(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DAdaQuant's q, read from the bytes that travelled, follows the losses that the server wrote down."""
    found: dict[tuple[int, str], int] = {}
    receive = ServerCoder.receive

    def read(end: ServerCoder, reply: Message[Any]) -> Message[Any]:
        if PAYLOAD in reply.slots:
            _, _, rest = tag_of(reply.slots[PAYLOAD]["model"].numpy().tobytes())
            assert end._pending is not None
            found[end._pending[1].round, end.site] = struct.unpack("<fH", rest[4:10])[1]
        return receive(end, reply)

    monkeypatch.setattr(ServerCoder, "receive", read)
    # No learning, so the loss stands still: after five rounds the levels double.
    job = replace(make_job(rounds=7, method=SoftPull(lr=1e-12, batch_size=8)), codecs=Codecs(None, DAdaQuant()))
    run_until(job, table_sites, tmp_path, 6)
    whole = run(job, table_sites, tmp_path)
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "results" / "metrics.jsonl").read_text().splitlines()]
    sizes = {site: count["train"] for site, count in summary["sizes"].items()}
    scales = dict(zip(sizes, hospital_scales(list(sizes.values())), strict=True))
    losses = [
        np.mean(
            [
                loss
                for line in lines
                if line["split"] == "train" and line["round"] == n
                for loss in line["loss"].values()
            ]
        )
        for n in range(1, 8)
    ]
    expected = {
        (n, s): max(1, round(levels_over_time(losses[: n - 1]) * scales[s])) for n in range(1, 8) for s in sizes
    }
    assert found == expected and len(set(found.values())) > 1
    assert_same(run(job, table_sites, tmp_path / "whole"), whole)


def run_until(job: Job, sites: dict[str, Path], folder: Path, stop: int) -> None:
    from medpfl.rounds.simulate import simulate

    simulate(job, sites, folder / "results", folder / "home", stop_after=stop)


@pytest.mark.slow
def test_other_codecs_are_another_run(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    run_until(replace(make_job(), codecs=STRONG), table_sites, tmp_path, 2)
    run(replace(make_job(), codecs=Codecs(None, Half())), table_sites, tmp_path)
    events = json.loads((tmp_path / "results" / "summary.json").read_text())["events"]
    assert any("kept and not resumed" in event["event"] for event in events)


@pytest.mark.slow
def test_a_hospital_that_lost_its_copies_gets_a_whole_message(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = replace(make_job(rounds=4), codecs=STRONG)
    run_until(job, table_sites, tmp_path, 2)
    (lost,) = (tmp_path / "home" / "anna" / "small" / "state").glob("*/codec")
    shutil.rmtree(lost)
    run(replace(make_job(rounds=4), codecs=STRONG), table_sites, tmp_path)
    events = json.loads((tmp_path / "results" / "summary.json").read_text())["events"]
    assert [event["round"] for event in events if "nothing is kept here of exchange 2" in event["event"]] == [3]
    sent = json.loads((tmp_path / "results" / "bytes.json").read_text())
    anna = {line["round"]: line for line in sent if line["site"] == "anna" and line["direction"] == "to_site"}
    assert sorted(anna) == [1, 2, 4, 5] and anna[4]["ratio"] == 1 and anna[2]["ratio"] > 1


@pytest.mark.slow
def test_a_reference_model_changes_nothing_of_the_others(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = SoftPull(lr=0.05, batch_size=8)
    alone = replace(make_job(mixers={"model": Mean()}, method=method), codecs=STRONG)
    beside = replace(make_job(mixers={"local": Identity(), "fedavg": Mean(), "model": Mean()}), codecs=STRONG)
    one, other = run(alone, table_sites, tmp_path / "1"), run(beside, table_sites, tmp_path / "2")
    for key, tensor in one["slots"]["model"].items():
        assert torch.equal(tensor, other["slots"]["model"][key])


@pytest.mark.slow
def test_batchnorm_statistics_travel_as_they_are(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = replace(make_job(task=NormedTabular(dataset="blood", hidden=(4,))), codecs=STRONG)
    found = run(job, table_sites, tmp_path)["slots"]["fedavg"]
    variances = [tensor for key, tensor in found.items() if key.endswith("running_var")]
    assert variances and all((tensor > 0).all() for tensor in variances)


@dataclass(frozen=True, kw_only=True)
class Broken(SoftPull):
    """Its model at berta becomes NaN in round 2."""

    def local_round(self, site: Site) -> None:
        super().local_round(site)
        if (site.name, site.round) == ("berta", 2):
            with torch.no_grad():
                next(site.models["model"].parameters()).fill_(torch.nan)


@pytest.mark.slow
def test_nan_is_the_hospitals_failed_round(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    mixers = {"model": Mean()}
    job = replace(make_job(rounds=2, mixers=mixers, method=Broken(lr=0.05)), codecs=STRONG)
    run(job, table_sites, tmp_path)
    events = json.loads((tmp_path / "results" / "summary.json").read_text())["events"]
    (told,) = [event for event in events if event["site"] == "berta" and "failed" in event["event"]]
    assert told["round"] == 2 and "it holds NaN" in told["event"]


def test_the_job_files(make_job: Make, tmp_path: Path) -> None:
    folder = write_job(replace(make_job(), codecs=Codecs(STC(0.05), Chain(CER(0.1), STC(0.01)))), tmp_path / "both")
    write_job(replace(make_job(), codecs=Codecs(None, Half())), tmp_path / "one")
    config = folder / "app" / "config" / "config_fed_client.json"
    client = json.loads(config.read_text())

    def refused(change: dict[str, Any], sentence: str) -> None:
        config.write_text(json.dumps({**client, **change}))
        with pytest.raises(ConfigError, match=sentence):
            load_job(folder)

    refused({"task_result_filters": []}, "config_fed_client.json: task_result_filters: no codec filter here")
    wrong = {"task_data_filters": client["task_result_filters"]}
    refused(wrong, "EncodeUpdate does not belong here; medpfl.flare.filters.DecodeUpdate does")
    entry = client["task_result_filters"][0]
    refused({"task_result_filters": [{**entry, "tasks": ["train"]}]}, r"'tasks' must be \[\"init\", \"train\"")
    bad = {"path": entry["filters"][0]["path"], "args": {"codec": {"path": "medpfl.core.codecs.STC", "args": {"p": 2}}}}
    refused({"task_result_filters": [{**entry, "filters": [bad]}]}, "STC's p must be in")
    none = {"path": bad["path"], "args": {"codek": 1}}
    refused({"task_result_filters": [{**entry, "filters": [none]}]}, "unknown key 'codek'")


def test_a_difference_beyond_float16_is_refused_at_the_hospital(tmp_path: Path) -> None:
    """It decoded to infinity there, and the hospital trained on it."""
    _, site, header = messages(tmp_path)
    like = {"w": torch.zeros(40, 5, dtype=torch.float16)}
    site._start = {"model::w": like["w"]}
    data = STC(1.0).message(like, np.full(200, 1e5, np.float32))
    payload = {PAYLOAD: {"model": torch.frombuffer(bytearray(data), dtype=torch.uint8)}}
    with pytest.raises(CodecError, match=r"anna: 'model::w' decodes to values beyond torch\.float16"):
        site.receive(Message(header, payload, Coded(number=1, base=0, codec="stc")))


def test_a_hospitals_end_goes_on_in_another_process(tmp_path: Path) -> None:
    """After the first exchange it is rebuilt from what was kept of it; the rest is on disk as ever."""
    ends = [messages(tmp_path / name) for name in ("one", "two")]
    back = Chain(CER(0.1), STC(0.2))
    sent = []
    for number in (1, 2, 3):
        for place, (server, site, header) in enumerate(ends):
            if place and number == 3:
                site = SiteCoder(tmp_path / "two" / "anna", "anna")
                site.start_again(tmp_path / "two" / "start.safetensors")
            received = site.receive(server.send(Message(at(header, number), model(number)), None))
            reply = TrainReply(round=number, metrics=(), loss={}, notes=(), seconds=0.0)
            sent.append(server.receive(site.send(Message(reply, received.slots), back)).slots)
    for one, two in itertools.pairwise(sent[4:]):
        assert all(torch.equal(one["model"][key], two["model"][key]) for key in one["model"])


def test_a_job_of_which_nothing_can_be_encoded_is_refused(tmp_path: Path) -> None:
    """Its codecs did nothing, without a word."""
    job = replace(EVERY["FedMD"].job(), codecs=Codecs(Half(), Half()))
    with pytest.raises(CodecError, match=r"^anna: nothing that this job's hospitals send can be encoded"):
        run(job, write_both(tmp_path / "sites")[True], tmp_path)
