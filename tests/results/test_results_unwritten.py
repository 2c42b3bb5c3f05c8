# SPDX-License-Identifier: Apache-2.0
"""A disk that is full where a job's results are written."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from medpfl.core.errors import MedPFLError
from medpfl.flare import exchange
from medpfl.job import Job
from medpfl.results.files import write_json
from medpfl.results.report import write_page
from medpfl.results.schema import ControllerArguments, FailureReport, FinalLine, TrainingSummary
from medpfl.rounds.simulate import simulate


def test_a_job_whose_results_cannot_be_written_ends_with_a_sentence(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(MedPFLError, match=r"cannot write the job's results: .*No space left on device"):
        simulate(make_job(rounds=1), table_sites, tmp_path / "results", tmp_path / "home")


class _Ends(exchange.ExchangeController):
    def _run(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        raise MedPFLError("the reason")


def test_the_reason_of_a_failure_is_told_where_it_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(reason: str) -> None:
        raise MedPFLError("the disk is full")

    for name in ("check_filters", "take_decoding", "Fetcher"):
        monkeypatch.setattr(exchange, name, lambda fl_ctx: frozenset())
    monkeypatch.setattr(exchange, "Asking", lambda fl_ctx: SimpleNamespace(close=lambda: None))
    controller: Any = _Ends(grace=1.0)
    controller.coordinator = SimpleNamespace(record=SimpleNamespace(fail=full))
    told: list[str] = []
    ended: list[str] = []
    controller.log_error = lambda fl_ctx, text: told.append(text)
    controller.system_panic = lambda text, fl_ctx: ended.append(text)
    controller.control_flow(Signal(), FLContext())
    assert told == ["the disk is full", "the reason"] and ended == ["the reason"]


@contextmanager
def _room_for(size: int) -> Iterator[None]:
    """While it is entered, a file that grows beyond so many bytes cannot be written."""
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_page_that_cannot_be_written_leaves_the_one_before_whole(tmp_path: Path) -> None:
    """On a disk that fills up, it was half a page in place of a whole one."""
    found = TrainingSummary(
        classes=[], sizes={"anna": {"train": 9}}, versions={}, components={}, recipe=None, personalised="local",
        settings=ControllerArguments(rounds=5, seed=0), score="dice", codecs=None, job="small", medpfl="1",
        written="now", roster=["anna"], best={}, slots={}, events=[],
        test=[FinalLine(site="anna", model="local", round=1, metrics={"dice": 0.5}, choice="best")],
    )  # fmt: skip
    page = write_page(tmp_path, found, [], {}, [])
    before = page.read_text()
    with _room_for(1000), pytest.raises(MedPFLError, match=r"cannot write .*report\.html: File too large"):
        write_page(tmp_path, found, [], {}, [])
    assert page.read_text() == before and list(tmp_path.iterdir()) == [page]


def test_a_json_file_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    """It would take what room there is left on a full disk."""
    with _room_for(100), pytest.raises(OSError, match="File too large"):
        write_json(tmp_path / "failure.json", FailureReport(job="small", reason="x" * 200, events=[]))
    assert not list(tmp_path.iterdir())
