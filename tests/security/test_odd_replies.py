# SPDX-License-Identifier: Apache-2.0
"""A hospital answers something odd to end the job for all: every such answer is that hospital's refused round."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from exchanging import Asked, slots
from hostile import attacked, content, hospital_for_each, saying, saying_text, told_of, with_arrays
from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.softpull import SoftPull
from medpfl.results.files import read_training
from medpfl.rounds.memory import WANTED
from medpfl.rounds.messages import Message

Make = Callable[..., Job]
Odd = Callable[[Shareable], Shareable]

QUICK = SoftPull(lr=0.05, batch_size=8, steps=1)
FORMS: dict[str, Odd] = {
    "nothing": lambda honest: Shareable(),
    "no text": lambda honest: saying_text(honest, None),
    "no JSON": lambda honest: saying_text(honest, "odd"),
    "a list": lambda honest: saying_text(honest, "[]"),
    "deeply nested": lambda honest: saying_text(honest, '{"content":' * 50_000),
    "deep lists": lambda honest: saying_text(honest, "[" * 50_000 + "]" * 50_000),
    "no Unicode": lambda honest: saying_text(honest, "\ud800"),
    "a number for text": lambda honest: saying_text(honest, 10**400),
    "twenty megabytes": lambda honest: saying_text(honest, " " * 20 * 2**20),
    "another task": lambda honest: saying(honest, task="statistics"),
    "an unknown task": lambda honest: saying(honest, task="dance"),
    "a further key": lambda honest: saying(honest, refine={"x": 1}),
    "a failure with a list for reason": lambda honest: make_reply(ReturnCode.EXECUTION_EXCEPTION, {"medpfl_error": []}),
    "a return code that is an array": lambda honest: make_reply(np.zeros(3)),
    "headers that are none": lambda honest: Shareable({ReservedHeaderKey.HEADERS: [1]}),
}

ARRAYS: dict[str, Odd] = {
    "objects for arrays": lambda honest: with_arrays(honest, lambda name, array: np.array([{}], dtype=object)),
    "empty arrays": lambda honest: with_arrays(honest, lambda name, array: array.reshape(-1)[:0]),
    "a name with a line break": lambda honest: with_extra(honest, "model::x\nserver: resumed"),
    "a name without end": lambda honest: with_extra(honest, "model::" + "x" * 100_000),
    "text for arrays": lambda honest: with_arrays(honest, lambda name, array: np.array("x")),
    "NaN": lambda honest: with_arrays(honest, lambda name, array: array * array.dtype.type(float("nan"))),
    "complex numbers": lambda honest: with_arrays(honest, lambda name, array: array.astype(np.complex64)),
    "parts that are none": lambda honest: in_parts(honest, {"differences": 1, "whole": {}}),
    "one part": lambda honest: in_parts(honest, {"differences": DXO(DataKind.WEIGHT_DIFF, {})}),
    "parts of no slots": lambda honest: in_parts(honest, DIFFERENCES),
    "slots that are a number": lambda honest: in_parts(honest, DIFFERENCES, 5),
    "slots with a line break": lambda honest: in_parts(honest, DIFFERENCES, ["model\nserver: resumed"]),
    "slots without end": lambda honest: in_parts(honest, DIFFERENCES, ["x" * 100_000]),
    "a difference of objects": lambda honest: in_parts(honest, of_parts(np.array([{}], dtype=object)), ["model"]),
    "a difference of another shape": lambda honest: in_parts(honest, of_parts(np.zeros(99)), ["model"]),
    "a difference of NaN": lambda honest: in_parts(honest, nan_of(honest), ["model"]),
    "a difference of 1e30": lambda honest: in_parts(honest, nan_of(honest, 1e30), ["model"]),
    "parts within parts": lambda honest: in_parts(
        honest, {**DIFFERENCES, "whole": DXO(DataKind.COLLECTION, {"whole": DXO(DataKind.WEIGHTS, {})})}, ["model"]
    ),
    "other byte order": lambda honest: with_arrays(honest, lambda name, array: array.astype(">f4")),
}
TRAINED: dict[str, Odd] = {
    "metric of 400 digits": lambda honest: with_metrics(honest, 10**400),
    "metric of NaN": lambda honest: saying_text(honest, json.dumps({"content": with_metrics_of(honest, float("nan"))})),
    "metric as text": lambda honest: with_metrics(honest, "0.5"),
    "notes are a number": lambda honest: saying(honest, notes=5),
    "a note with a line break": lambda honest: saying(honest, notes=["all is well\nserver: resumed"]),
    "seconds below 0": lambda honest: saying(honest, seconds=-1.0),
    "seconds without end": lambda honest: saying(honest, seconds=1e308),
    "loss beyond sums": lambda honest: saying(honest, loss={"personal": 1e308}),
    "loss of a formula": lambda honest: saying(honest, loss={"$\\frac$": 1.0}),
    "metrics of a formula": lambda honest: saying(honest, metrics=[{**LINE, "model": "$\\frac$"}]),
    "a metric that is none": lambda honest: saying(honest, metrics=[{**LINE, "metrics": {"$\\frac$": 0.5}}]),
    "a line of a round": lambda honest: saying(honest, metrics=[{**LINE, "split": "round"}]),
    "another round": lambda honest: saying(honest, round=1000),
    "an array too many": lambda honest: with_extra(honest),
    "no arrays": lambda honest: with_arrays_only(honest, 0),
}
DIFFERENCES = {"differences": DXO(DataKind.WEIGHT_DIFF, {}), "whole": DXO(DataKind.APP_DEFINED, {})}


def in_parts(honest: Shareable, parts: dict[str, Any], slots: object = None) -> Shareable:
    """What the server takes for an answer behind one of FLARE's privacy filters."""
    meta = {**from_shareable(honest).meta, **({} if slots is None else {"medpfl_slots": slots})}
    return DXO(DataKind.COLLECTION, parts, meta).to_shareable()


def of_parts(array: Any, name: str = "model::model.0.weight") -> dict[str, DXO]:
    return {**DIFFERENCES, "differences": DXO(DataKind.WEIGHT_DIFF, {name: array})}


def nan_of(honest: Shareable, value: float = float("nan")) -> dict[str, DXO]:
    name, array = next((name, array) for name, array in from_shareable(honest).data.items() if array.dtype == "f4")
    return of_parts(np.full_like(array, value), name)


LINE = {"model": "personal", "split": "validation", "round": 1, "metrics": {"accuracy": 0.5}}


def with_metrics_of(honest: Shareable, value: Any) -> dict[str, Any]:
    said = content(honest)
    round_number = said["round"] - 1
    return {**said, "metrics": [{**LINE, "round": round_number, "metrics": {"accuracy": value}}]}


def with_metrics(honest: Shareable, value: Any) -> Shareable:
    return saying(honest, metrics=with_metrics_of(honest, value)["metrics"])


def with_extra(honest: Shareable, name: str = "model::more") -> Shareable:
    honest["DXO"]["data"][name] = np.zeros(1, np.float32)
    return honest


def with_arrays_only(honest: Shareable, count: int) -> Shareable:
    honest["DXO"]["data"] = dict(list(honest["DXO"]["data"].items())[:count])
    return honest


@pytest.mark.slow
def test_odd_answers_to_train_are_refused_rounds(make_job: Make, tmp_path: Path) -> None:
    """Every dishonest hospital sends something else in the second of three rounds."""
    odd = {**FORMS, **ARRAYS, **TRAINED}
    sites, kind_of = hospital_for_each(odd, tmp_path / "sites")

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        header = asked.header
        return odd[kind_of[site]](honest) if site in kind_of and (header.task, header.round) == ("train", 2) else honest

    coordinator, _ = attacked(make_job(rounds=3, mixers={"model": Mean()}, method=QUICK), sites, tmp_path, attack)
    summary = read_training(tmp_path / "r")
    told = [event for event in summary.events if not event.event.startswith("trained in ")]
    refused = {event.site: event.event for event in told}
    assert {kind_of[site] for site in kind_of.keys() - refused.keys()} == set()
    assert refused.keys() == kind_of.keys() and {event.round for event in told} == {2}
    assert all(len(event) < 1300 and event.isprintable() for event in refused.values())
    assert coordinator.done == 3 and {line.site for line in summary.test} == set(sites)


FIRST: dict[str, Odd] = {
    "size as text": lambda honest: saying(honest, sizes={"train": "abc", "validation": 1, "test": 1}),
    "size of NaN": lambda honest: saying(honest, sizes={"train": float("nan"), "validation": 1, "test": 1}),
    "size 0": lambda honest: saying(honest, sizes={"train": 0, "validation": 1, "test": 1}),
    "size below 0": lambda honest: saying(honest, sizes={"train": -341, "validation": 1, "test": 1}),
    "size of a list": lambda honest: saying(honest, sizes=[1, 2, 3]),
    "no plan": lambda honest: saying(honest, plan=None),
    "infinite weights": lambda honest: with_arrays(honest, lambda name, array: np.full_like(array, np.inf)),
    "huge weights": lambda honest: with_arrays(honest, lambda name, array: np.full_like(array, 1e30)),
    "a private slot": lambda honest: with_private_slot(honest),
}


def test_a_reason_that_repeats_what_a_hospital_says_is_bounded(make_job: Make, tmp_path: Path) -> None:
    """Of its first answer: it would stand in the server's log, in every checkpoint, and in the report."""
    long: dict[str, Odd] = {
        "classes": lambda honest: saying(honest, classes=["x" * 1000] * 10_000),
        "checkpoints": lambda honest: saying(honest, common={f"{number:0500d}": "0" * 64 for number in range(9000)}),
    }
    sites, kind_of = hospital_for_each(long, tmp_path / "sites")

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        return long[kind_of[site]](honest) if site in kind_of and asked.header.task == "init" else honest

    coordinator, _ = attacked(make_job(rounds=1, mixers={"model": Mean()}, method=QUICK), sites, tmp_path, attack)
    for site in kind_of:
        (told,) = told_of(coordinator, site)
        assert told.startswith("takes no part: ") and len(told) < 1300
    assert (tmp_path / "r" / "summary.json").stat().st_size < 100_000


def test_values_that_no_file_can_hold_are_a_refused_round(
    make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where models lie in files, also because one hospital sent so much."""
    monkeypatch.setenv(WANTED, "0")
    sites, kind_of = hospital_for_each(["complex"], tmp_path / "sites")

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        odd = site in kind_of and asked.header.task == "train"
        return with_arrays(honest, lambda name, array: array.astype(np.complex128)) if odd else honest

    coordinator, _ = attacked(make_job(rounds=1, mixers={"model": Mean()}, method=QUICK), sites, tmp_path, attack)
    (told,) = told_of(coordinator, "odd-00")
    assert told.startswith("failed: entry 'model::model.") and "torch.complex128" in told
    assert coordinator.done == 1


def with_private_slot(honest: Shareable) -> Shareable:
    honest["DXO"]["data"]["local::local.0.weight"] = np.zeros(1, np.float32)
    return honest


@pytest.mark.slow
def test_an_odd_first_answer_leaves_its_hospital_out(make_job: Make, tmp_path: Path) -> None:
    odd = {**FORMS, **ARRAYS, **FIRST}
    sites, kind_of = hospital_for_each(odd, tmp_path / "sites")

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        return odd[kind_of[site]](honest) if site in kind_of and asked.header.task == "init" else honest

    coordinator, _ = attacked(make_job(rounds=1, mixers={"model": Mean()}, method=QUICK), sites, tmp_path, attack)
    assert coordinator.joined == ["yves", "zoe"] and coordinator.done == 1
    assert [len(told_of(coordinator, site)) for site in kind_of] == [1] * len(odd)


LAST: dict[str, Odd] = {
    **FORMS,
    "a model named as a formula": lambda honest: saying(honest, metrics=[{**TEST, "model": "$\\frac$"}]),
    "a test without a choice": lambda honest: saying(honest, metrics=[{**TEST, "choice": None}]),
    "a test of a round to come": lambda honest: saying(honest, metrics=[{**TEST, "round": 999_999}]),
    "a metric with markup": lambda honest: saying(honest, metrics=[{**TEST, "metrics": {"<script>": 1.0}}]),
    "a perfect score and more": lambda honest: saying(honest, metrics=[{**TEST, "metrics": {"accuracy": 1e308}}]),
    "the same test twice": lambda honest: saying(honest, metrics=[TEST, TEST]),
    "tensors": lambda honest: with_tensors(honest),
}
TEST = {"model": "personal", "split": "test", "round": 1, "metrics": {"accuracy": 0.5}, "choice": "last"}


def with_tensors(honest: Shareable) -> Shareable:
    honest["DXO"]["data"] = {"model::model.0.weight": np.zeros(3, np.float32)}
    return honest


@pytest.mark.slow
def test_odd_answers_in_the_end_do_not_break_the_report(make_job: Make, tmp_path: Path) -> None:
    """All rounds were done, and the report was lost."""
    sites, kind_of = hospital_for_each(LAST, tmp_path / "sites")

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        return LAST[kind_of[site]](honest) if site in kind_of and asked.header.task == "finish" else honest

    coordinator, _ = attacked(make_job(rounds=1, mixers={"model": Mean()}, method=QUICK), sites, tmp_path, attack)
    assert {line.site for line in read_training(tmp_path / "r").test} == {"yves", "zoe"}
    assert {event.site for event in coordinator.record.events} == set(kind_of)
    assert (tmp_path / "r" / "report.html").is_file()


@pytest.mark.slow
def test_odd_answers_within_a_round_are_refused(make_job: Make, tmp_path: Path) -> None:
    odd: dict[str, Odd] = {
        **FORMS,
        **ARRAYS,
        "another step": lambda honest: saying(honest, step=7),
        "another round": lambda honest: saying(honest, round=7),
    }
    sites, kind_of = hospital_for_each(odd, tmp_path / "sites")

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        return odd[kind_of[site]](honest) if site in kind_of and asked.header.task == "refine" else honest

    job = make_job(rounds=1, mixers=slots(), method=Asked(lr=0.05, batch_size=8, steps=1))
    coordinator, _ = attacked(job, sites, tmp_path, attack)
    assert coordinator.done == 1 and {event.site for event in coordinator.record.events} == set(kind_of)


@pytest.mark.slow
def test_a_line_that_names_another_hospital_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """A metric line could carry the name of who is to be made look bad."""

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if site != "anna" or asked.header.task != "finish":
            return honest
        return saying(honest, metrics=[{**TEST, "site": "berta", "metrics": {"accuracy": 0.0}}])

    coordinator, _ = attacked(make_job(rounds=1), table_sites, tmp_path, attack)
    assert "'content.finish.metrics.0.site'" in told_of(coordinator, "anna")[0]
    tests = read_training(tmp_path / "r").test
    assert {line.site for line in tests} == {"berta", "clara", "dora"}
    assert all(line.metrics["accuracy"] for line in tests if line.site == "berta")


@pytest.mark.slow
def test_a_gain_next_to_nothing_ends_no_job(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Within its range, so it is no odd answer; how many patients would show it is beyond all numbers."""

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if site != "anna" or asked.header.task != "finish":
            return honest
        told = content(honest)
        sure = {"patients": 8, "interval": [0.5, 0.7], "gain": 1e-300, "gained": [-0.1, 0.1]}
        metrics = [{**line, "certainty": None if line["model"] == "local" else sure} for line in told["metrics"]]
        test = next(line for line in metrics if (line["model"], line["choice"]) == ("personal", "best"))
        return saying(honest, metrics=metrics, chosen={"test": test})

    coordinator, _ = attacked(make_job(rounds=1), table_sites, tmp_path, attack)
    assert not told_of(coordinator, "anna") and read_training(tmp_path / "r").chosen["anna"].test.model == "personal"
    assert (tmp_path / "r" / "report.html").is_file()
