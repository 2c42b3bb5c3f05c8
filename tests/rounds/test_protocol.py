# SPDX-License-Identifier: Apache-2.0
"""The wire: whatever comes, parsing raises one kind of error, and a reply says what was asked for and no more."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.shareable import Shareable

from medpfl.core.errors import ProtocolError
from medpfl.flare.wire import put, read_reply, read_request
from medpfl.job import Job
from medpfl.results.line import MetricLine
from medpfl.results.schema import BestRound
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import (
    EvaluateReply,
    FinishReply,
    Plan,
    Reply,
    StatisticsReply,
    TrainReply,
    ValidateReply,
)
from medpfl.rounds.protocol.requests import FinishRequest, Request, TrainRequest, ValidateRequest
from medpfl.rounds.protocol.text import Answered, Asked, parse
from medpfl.rounds.server.answers import check_answer
from medpfl.rounds.terms import Terms
from medpfl.tasks.metrics.measure import Measure
from tools import exchange, pieces, ready, retell, round_of

Make = Callable[..., Job]
LINE: dict[str, Any] = {"model": "personal", "split": "validation", "round": 1, "metrics": {"dice": 0.5}}
TRAINED: dict[str, Any] = {
    "task": "train", "round": 2, "metrics": [LINE], "loss": {"personal": 0.1}, "notes": [], "seconds": 1.5,
}  # fmt: skip
READY: dict[str, Any] = {
    "task": "init", "sizes": {"train": 9, "validation": 3, "test": 0}, "config": "c", "common": {}, "buffers": [],
    "recipe": {"method": {}, "task": {}, "input_shape": [3], "preparation": {}}, "personalised": "personal",
    "score": "dice", "measures": {"dice": {"direction": "higher", "unit": ""}}, "classes": ["no", "yes"],
    "versions": {"torch": "2"},
    "plan": {"models": ["personal"], "tested": ["personal"], "numbers": ["alpha"], "refined": [], "shown": [],
             "steps": [0, 0]},
}  # fmt: skip
EVALUATED: dict[str, Any] = {
    "task": "evaluate", "metrics": [LINE], "measures": READY["measures"], "cases": 3, "versions": {"torch": "2"},
}  # fmt: skip
PLAN = Plan(models=("personal",), tested=("personal",), numbers=("alpha",), refined=(), shown=(), steps=(0, 0))
TERMS = Terms(
    plan=PLAN, method={}, task={}, personalised="personal", score="dice", measures={"dice": Measure()},
    ranges={"dice": (0.0, 1.0), "mae": (0.0, math.inf)}, codecs=None, adapts=False,
)  # fmt: skip
OF_RUN: dict[str, Any] = {"run": "r", "rounds": 2, "best": {"personal": BestRound(round=1, score=0.5)}}


def text(content: dict[str, Any], **change: Any) -> str:
    return json.dumps({"content": {**content, **change}})


def test_good_ones_are_read() -> None:
    assert isinstance(parse(Answered, text(TRAINED)).content, TrainReply)
    assert parse(Answered, text(READY)).coded is None
    assert isinstance(parse(Answered, text(EVALUATED)).content, EvaluateReply)


@pytest.mark.parametrize(
    "content",
    [
        *(
            text(READY, sizes={**READY["sizes"], "train": value})
            for value in ("abc", [3], float("nan"), 0, -4, 10**400)
        ),
        *(text(READY, sizes=value) for value in ("abc", [], {}, {"train": 3}, {"train": 1, "validation": 1, "x": 1})),
        text(READY, versions={str(number): "1" for number in range(21)}),
        text(READY, versions={"torch": 5}),
        text(READY, versions={"torch": "2" * 101}),
        text(READY, versions={"torch": "2\x1b[2J"}),
        text(READY, sizes={**READY["sizes"], "validation": 2**53}),
        text(READY, plan={**READY["plan"], "steps": [10_001]}),
        text(READY, **{"\x1b[2J": 1}),
        text(READY, plan={}),
        text(TRAINED, notes=5),
        text(TRAINED, notes=[5]),
        text(TRAINED, notes=["x"] * 101),
        text(TRAINED, notes=["x" * 1001]),
        text(TRAINED, refine={"x": 1}),
        text(TRAINED, metrics=[{**LINE, "site": "berta"}]),
        text(TRAINED, metrics=[{**LINE, "split": "round"}]),
        text(TRAINED, metrics=[{**LINE, "metrics": {"dice": 10**400}}]),
        text(TRAINED, metrics=[LINE] * 101),
        text(TRAINED, metrics=5),
        text(TRAINED, loss={"personal": float("inf")}),
        text(TRAINED, loss=[1]),
        text(TRAINED, seconds=-1),
        text(TRAINED, seconds="1.5"),  # no number is made of a text, nor of a truth
        text(TRAINED, round="2"),
        text(TRAINED, round=True),
        text(READY, sizes={**READY["sizes"], "test": "0"}),
        text(TRAINED, seconds=1e300),
        text(EVALUATED, metrics=[LINE] * 2),
        text(TRAINED, round=10**400),
        text(TRAINED, task="dance"),
        json.dumps({"content": [TRAINED]}),
        json.dumps([TRAINED]),
        json.dumps({}),
        "",
        "{",
        "[" * 100_000,
        '{"content":' * 100_000,
        "\ud800",
        None,
        5,
        b"bytes",
        text(TRAINED) + " " * (16 * 2**20),
    ],
    ids=lambda content: str(content)[:60],
)
def test_parsing_raises_one_error_only(content: object) -> None:
    for kind in (Answered, Asked):
        with pytest.raises(ProtocolError) as caught:
            parse(kind, content)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
@pytest.mark.slow
def test_no_json_raises_another_error(value: Any) -> None:
    for content in (json.dumps(value), text(TRAINED, metrics=value), text(READY, plan=value, sizes=value)):
        with contextlib.suppress(ProtocolError):
            parse(Answered, content)


def shareable(data: object, meta: object) -> Shareable:
    found: Shareable = DXO(DataKind.WEIGHTS, data={"x": np.zeros(1)}, meta={}).to_shareable()
    found["DXO"] = {"kind": DataKind.WEIGHTS, "data": data, "meta": meta}
    return found


@pytest.mark.parametrize(
    "sent",
    [
        Shareable(),
        shareable({}, {}),
        shareable({}, {"medpfl": 5}),
        shareable({}, {"medpfl": "[" * 100_000}),
        shareable([], {"medpfl": text(TRAINED)}),
        shareable({"model::x": "text"}, {"medpfl": text(TRAINED)}),
        shareable({"model::x": np.array([object()])}, {"medpfl": text(TRAINED)}),
        shareable({}, 5),
    ],
    ids=range(8),
)
def test_no_shareable_raises_another_error(sent: Shareable) -> None:
    for read in (read_reply, read_request):
        with pytest.raises(ProtocolError):
            read(sent)


def test_a_message_survives_the_wire() -> None:
    header = TrainRequest(round=2, **OF_RUN)
    assert read_request(put(Message(header), Shareable())).header == header
    with pytest.raises(ProtocolError):
        read_reply(put(Message(header), Shareable()))


def line(**change: Any) -> MetricLine:
    return MetricLine(**{**LINE, **change})


def trained(*lines: MetricLine, round: int = 2, loss: dict[str, float] | None = None) -> TrainReply:
    return TrainReply(round=round, metrics=lines, loss=loss or {}, notes=(), seconds=0.0)


ASKED = TrainRequest(round=2, **OF_RUN)
FINISH = FinishRequest(round=2, finetune=0, **OF_RUN)


def final(**change: Any) -> FinishReply:
    return FinishReply(metrics=(line(**{"split": "test", "round": 2, "choice": "last", **change}),), notes=())


@pytest.mark.parametrize(
    ("asked", "reply", "words"),
    [
        (ASKED, trained(line()), None),
        (ASKED, trained(line(model="alpha", metrics={"alpha": 0.1})), None),
        (ASKED, StatisticsReply(), "asked to 'train' and answered to 'statistics'"),
        (ASKED, trained(round=1), "asked for round 2 and answered of round 1"),
        (ASKED, trained(line(round=2)), "not of the validation of round 1"),
        (ASKED, trained(line(split="test")), "not of the validation of round 1"),
        (ASKED, trained(line(choice="best")), "not of the validation of round 1"),
        (ASKED, trained(line(model="other")), "tells of 'other', which is not of the job's method"),
        (ASKED, trained(line(model="alpha")), "tells of 'alpha', which is not of the job's method"),
        (ASKED, trained(line(), line()), "tells twice of 'personal'"),
        (ASKED, trained(line(metrics={"dice": 1e308 / 1e300})), "its dice of 'personal' is not between 0 and 1"),
        (ASKED, trained(line(metrics={"mae": -1.0})), "its mae of 'personal' is not between 0 and inf"),
        (ASKED, trained(line(metrics={"mae": 1e9, "dice": None})), None),
        (ASKED, trained(line(metrics={"$\\frac$": 0.5})), "which is no metric of the job's task"),
        (ASKED, trained(loss={"other": 0.1}), "tells the training loss of 'other'"),
        (TrainRequest(round=1, **OF_RUN), trained(line(round=0), round=1), "not of the validation of round 0"),
        (ValidateRequest(round=2, **OF_RUN), ValidateReply(metrics=(line(),), notes=()), "validation of round 2"),
        (FINISH, final(), None),
        (FINISH, final(choice="best", round=1), None),
        (FINISH, final(metrics={"dice": -0.1}), "not between 0 and 1"),
        (FINISH, final(metrics={"loss": 0.1}), "which is no metric of the job's task"),
        (FINISH, final(choice="last", round=1), "not of the test of a best or the last round"),
        (FINISH, final(choice="given", round=0), "not of the test of a best or the last round"),
        (FINISH, final(split="validation"), "not of the test of a best or the last round"),
        (FINISH, final(model="alpha", metrics={"alpha": 1.0}), "not of the job's method"),
    ],
)
def test_a_reply_says_what_was_asked(asked: Request, reply: Reply, words: str | None) -> None:
    if words is None:
        check_answer(asked, reply, TERMS)
        return
    with pytest.raises(ProtocolError, match=words):
        check_answer(asked, reply, TERMS)


@pytest.mark.slow
def test_the_job_goes_on_without_who_says_something_else(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The first of the hospitals announces exchanges that no other has, and takes no part; a second tells of a model
    that nobody announced, and misses the round."""
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    replies = exchange(runners, coordinator.init_messages())
    plan = replies["anna"].header.plan.model_copy(update={"refined": ("model",), "steps": (9, 9, 9)})
    retell(replies["anna"], plan=plan)
    coordinator.take_init(replies)
    assert coordinator.joined == ["berta", "clara", "dora"]
    assert "anna says another 'plan' of the job than the server's copy of it" in coordinator.record.events[0].event
    round_of(coordinator, runners, 1)
    replies = exchange(runners, coordinator.rounds.train_messages(2, coordinator.joined))
    invented = replies["dora"].header.metrics[0].model_copy(update={"model": "mine"})
    retell(replies["dora"], metrics=(invented,))
    assert coordinator.rounds.take_train(2, replies) == ["berta", "clara"]
    assert "update refused: it tells of 'mine', which is not of the job" in coordinator.record.events[-1].event
    assert "mine" not in coordinator.best


def test_a_hospital_refuses_a_run_that_it_is_not_ready_for(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    ready(coordinator, runners)
    message = coordinator.rounds.train_messages(1, ["anna"])["anna"]
    _, fresh = pieces(make_job(), table_sites, tmp_path / "fresh")
    with pytest.raises(ProtocolError, match="before it was asked to get ready"):
        fresh["anna"].handle(message)
