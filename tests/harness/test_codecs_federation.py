# SPDX-License-Identifier: Apache-2.0
"""Codec filters in a federation: the same results as in process, few bytes on the wire, one sentence without them."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exchanging import Asked, slots
from in_process import Harness, tensors_of
from medpfl.core.codecs import CER, STC, Chain
from medpfl.core.mixers import AttentiveMessages
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedamp import FedAMP
from medpfl.rounds.coders import ServerCoder
from medpfl.rounds.coding import PAYLOAD
from tools import assert_same, outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]
CODECS = Codecs(STC(0.2), Chain(CER(0.1), STC(0.1)))


def found(harness: Harness, name: str) -> Any:
    return json.loads((harness.results / name).read_text())


def test_filters_equal_simulate_bit_for_bit(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoding = ServerCoder.receive, set()

    def receive(coder: ServerCoder, reply: Any) -> Any:
        decoding.add(threading.get_ident())
        return decode(coder, reply)

    monkeypatch.setattr(ServerCoder, "receive", receive)

    def job() -> Job:
        return replace(make_job(rounds=4, mixers=slots(), method=Asked(lr=0.05, batch_size=8)), codecs=CODECS)

    harness = Harness(job(), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert len(decoding) == 1  # the controller's thread, and not those in which FLARE holds a lock and calls filters
    assert_same(outcome(harness.results), run(job(), table_sites, tmp_path / "simulated"))
    traffic = json.loads((tmp_path / "simulated" / "results" / "bytes.json").read_text())
    assert sorted(map(str, found(harness, "bytes.json"))) == sorted(map(str, traffic))
    sent = {"to_site": harness.down, "from_site": harness.wire}
    for direction, messages in sent.items():
        coded = [tensors_of(payload) for _, task, payload in messages if task in ("train", "refine", "validate")]
        # Nothing but encoded updates: whole networks travel in the init exchange only.
        assert coded and all(name.startswith(f"{PAYLOAD}::") for arrays in coded for name in arrays)
        asked = [tensors_of(payload) for _, task, payload in messages if task == "statistics"]
        total = sum(array.nbytes for arrays in (*coded, *asked) for array in arrays.values())
        assert total == sum(line["encoded"] for line in traffic if line["direction"] == direction)


def test_what_a_hospital_holds_itself_equals_simulate(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Both ends compare it with the last answer that arrived."""

    def job() -> Job:
        method, mixer = FedAMP(lr=0.05, batch_size=8), AttentiveMessages(alpha=0.1, sigma=1.0)
        return replace(make_job(rounds=4, mixers={"anchor": mixer}, method=method), codecs=CODECS)

    harness = Harness(job(), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None and not found(harness, "summary.json")["events"]
    assert_same(outcome(harness.results), run(job(), table_sites, tmp_path / "simulated"))


def test_lost_answers_do_not_part_the_ends(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return {("clara", 2): "silent", ("dora", 2): "late"}.get((site, round_number)) if task == "train" else None

    job = replace(make_job(rounds=4, train_timeout=6.0), codecs=CODECS)  # a busy machine takes seconds for a round
    harness = Harness(job, table_sites, tmp_path, script).run()
    assert harness.engine.panic is None
    events = found(harness, "summary.json")["events"]
    silent = {(event["site"], event["round"]) for event in events if "did not answer" in event["event"]}
    assert silent == {("clara", 2), ("dora", 2)} and not any("failed" in event["event"] for event in events)
    with np.load(harness.results / "mixing.npz") as stored:
        assert stored["model/00003"].diagonal() == pytest.approx(0.5)


def test_a_hospital_without_the_filter_refuses_with_a_sentence(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = replace(make_job(), codecs=CODECS)
    harness = Harness(job, table_sites, tmp_path, without=("berta",)).run()
    events = [event["event"] for event in found(harness, "summary.json")["events"] if event["site"] == "berta"]
    assert any("lacks the filter medpfl.flare.filters.DecodeUpdate" in text for text in events)
    assert all(line["site"] != "berta" for line in found(harness, "bytes.json"))
