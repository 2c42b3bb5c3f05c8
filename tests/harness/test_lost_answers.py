# SPDX-License-Identifier: Apache-2.0
"""An answer that does not come whole is asked for once more, and the job's result is what it would have been."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nvflare.apis.client import Client
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from exchanging import Asked, slots
from in_process import Harness
from medpfl.core.codecs import CER, STC, Chain
from medpfl.flare.fetching import Fetcher, LostAnswer
from medpfl.flare.wire import reply_of
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.softpull import SoftPull
from medpfl.privacy import ClippedNoise
from tools import assert_same, outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[tuple[str, str]]]:
    """Lose berta's answers of a task, in one round or in all, so many times each; counts what was fetched."""

    def lose(task: str, in_round: int | None = None, times: int = 1) -> Counter[tuple[str, str]]:
        fetched: Counter[tuple[str, str]] = Counter()
        lost: Counter[tuple[str, int]] = Counter()

        def fetch(self: Fetcher, client: Client, result: Shareable, over: Signal) -> None:
            header = reply_of(result).header
            place = header.task, getattr(header, "round", in_round or 0)
            fetched[client.name, header.task] += 1
            if client.name == "berta" and header.task == task and in_round in (None, place[1]) and lost[place] < times:
                lost[place] += 1
                raise LostAnswer("the line broke")

        monkeypatch.setattr(Fetcher, "fetch", fetch)
        return fetched

    return lose


def told(harness: Harness) -> list[str]:
    events = json.loads((harness.results / "summary.json").read_text())["events"]
    return [f"{event['site']}: {event['event']} (round {event['round']})" for event in events]


ONCE_MORE = "berta: its answer did not come whole: the line broke; it is asked once more (round {})"


def plain(make_job: Make) -> Job:
    return make_job()


def asked(make_job: Make) -> Job:
    return make_job(mixers=slots(), method=Asked(lr=0.05, batch_size=8))


def coded(make_job: Make) -> Job:
    return replace(make_job(), codecs=Codecs(STC(0.2), Chain(CER(0.1), STC(0.1))))


@pytest.mark.parametrize(
    "job, task, number, count",
    [
        (plain, "train", 1, 1),
        (plain, "train", 2, 1),
        (plain, "init", 0, 1),
        (asked, "statistics", 1, 1),
        (coded, "train", 2, 1),
        (coded, "init", 0, 1),
        (coded, "train", None, 3),
    ],
    ids=["first round", "a round", "init", "statistics", "codecs", "codecs, init", "codecs, every round"],
)
def test_it_is_asked_once_more_with_the_same_result(
    losing: Callable[..., Counter[tuple[str, str]]],
    job: Callable[[Make], Job],
    task: str,
    number: int | None,
    count: int,
    make_job: Make,
    table_sites: dict[str, Path],
    tmp_path: Path,
) -> None:
    simulated = run(job(make_job), table_sites, tmp_path / "simulated")
    fetched = losing(task, number)
    harness = Harness(job(make_job), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), simulated)
    assert fetched["berta", task] == fetched["anna", task] + count
    for round_number in [number] if number is not None else [1, 2, 3]:
        assert ONCE_MORE.format(round_number) in told(harness)


def test_it_is_not_asked_a_third_time(
    losing: Callable[..., Counter[tuple[str, str]]], make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    fetched = losing("train", 2, times=2)
    harness = Harness(make_job(), table_sites, tmp_path).run()
    assert harness.engine.panic is None
    assert fetched["berta", "train"] == 4
    lines = [line for line in told(harness) if "(round 2)" in line]
    lost = "berta: failed: its answer did not come whole: the line broke (round 2)"
    assert lines == [ONCE_MORE.format(2), lost]


def test_half_an_exchange_is_not_repeated(
    losing: Callable[..., Counter[tuple[str, str]]], make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    losing("refine", 2)
    harness = Harness(asked(make_job), table_sites, tmp_path).run()
    assert harness.engine.panic is None
    lines = [line for line in told(harness) if "did not come whole" in line]
    assert lines == ["berta: failed: its answer did not come whole: the line broke (round 2)"]


def test_noise_that_was_on_its_way_twice_is_paid_twice(
    losing: Callable[..., Counter[tuple[str, str]]], make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = SoftPull(lr=0.05, batch_size=8, privacy=ClippedNoise(noise_multiplier=1.0, clip=1.0, delta=1e-5))
    losing("train", 2)
    harness = Harness(make_job(method=method), table_sites, tmp_path).run()
    assert harness.engine.panic is None
    summary = json.loads((harness.results / "summary.json").read_text())
    spent = summary["privacy"]
    assert spent["berta"]["releases"] == spent["anna"]["releases"] + 1
    assert spent["berta"]["epsilon"] > spent["anna"]["epsilon"]
