# SPDX-License-Identifier: Apache-2.0
"""Messages that are over do not stay in memory until Python happens to look for objects that refer to each other."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nvflare.apis.signal import Signal

import medpfl.flare.executor as executor_module
from in_process import Engine, new_workspace
from medpfl.flare.executor import SiteExecutor
from medpfl.flare.memory import BIG, EVERY, Cleaner
from medpfl.flare.pieces import PIECE
from medpfl.flare.wire import ERROR, to_shareable
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.requests import TrainRequest
from small_jobs import small_job


class Circle:
    """What FLARE's streams are: it refers to itself, and holds a model."""

    def __init__(self) -> None:
        self.itself, self.model = self, np.zeros(10)


@pytest.fixture
def seldom() -> Iterator[None]:
    """Python does not look by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("seldom")
@pytest.mark.slow
def test_a_hospital_gives_back_what_messages_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "CLEANER", Cleaner())
    job = small_job()
    executor = SiteExecutor(job.method, job.task)
    fl_ctx = Engine("anna", new_workspace(tmp_path, "anna"), {}, []).new_context()
    request = to_shareable(Message(TrainRequest(run="r", round=2, rounds=2, best={})))
    left = []
    for number in range(EVERY):
        assert all(circle() is not None for circle in left), number
        left.append(weakref.ref(Circle()))
        reply = executor.execute("train", request, fl_ctx, Signal())
        assert reply.get_header(ERROR)  # it was not asked to begin; that it is asked is enough here
    assert not [circle for circle in left if circle() is not None]


@pytest.mark.slow
@pytest.mark.usefixtures("seldom")
def test_large_models_are_given_back_after_every_message() -> None:
    cleaner = Cleaner()
    for size, there in ((BIG, True), (BIG + 1, False)):
        left = weakref.ref(Circle())
        cleaner.clean(size)
        assert (left() is not None) == there


@pytest.mark.usefixtures("seldom")
def test_what_pieces_leave_is_given_back_before_the_message_is_whole() -> None:
    cleaner = Cleaner()
    cleaner.clean(BIG + 1)
    left = weakref.ref(Circle())
    for _ in range(7):
        cleaner.passed(PIECE)
        assert left() is not None
    cleaner.passed(PIECE)
    assert left() is None
