# SPDX-License-Identifier: Apache-2.0
"""A disk that is full where a job's results are written."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from medpfl.core.errors import MedPFLError
from medpfl.flare import exchange
from medpfl.job import Job
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
