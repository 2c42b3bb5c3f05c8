# SPDX-License-Identifier: Apache-2.0
"""Mutated replies and requests through the real way in: FLARE's serialiser, parsing, the checks of answers and tensors,
planning and joining; and files (``fuzz_files``). Whatever comes, there is one family of errors, and what is accepted is
sound."""

import dataclasses
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

from benchmarks import fuzz_files
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError, RefusedUpdate
from medpfl.data.fingerprint import Fingerprint
from medpfl.flare.wire import read_reply, read_request, to_shareable
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.models.auto import Auto
from medpfl.results.line import ChosenModel, MetricLine
from medpfl.results.record import Record
from medpfl.results.schema import BestRound, Rebuild
from medpfl.rounds.messages import Message, Slots, table
from medpfl.rounds.planning import Planning
from medpfl.rounds.protocol.replies import (
    FinishReply,
    InitReply,
    Plan,
    PlanReply,
    RefineReply,
    Sizes,
    StatisticsReply,
    TrainReply,
    ValidateReply,
)
from medpfl.rounds.protocol.requests import (
    FinishRequest,
    InitRequest,
    PlanRequest,
    RefineRequest,
    Request,
    StatisticsRequest,
    TrainRequest,
    ValidateRequest,
)
from medpfl.rounds.protocol.text import LONGEST
from medpfl.rounds.server.answers import check_answer
from medpfl.rounds.server.checks import LARGEST, check_update
from medpfl.rounds.server.joining import begins_with, join
from medpfl.rounds.server.quorum import Quorum
from medpfl.rounds.terms import Terms
from medpfl.tasks.metrics.certainty import Certainty
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.segmentation import Segmentation

SLOWEST = 2.0
"""Seconds that one message may take."""
MEMORY = 200.0
"""MiB by which the process may grow."""

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**53, 10**400, 0.5, -0.0, 1e18, 1e308, float("nan"), float("inf"), "", "x",
    "x" * 5000, "\n", "\x00", "\ud800", "<script>", "../../x", "$\\frac$", [], {}, [[]], {"x": {}}, ["x"] * 200,
    {"task": "init"},
]  # fmt: skip
BUFFERS = ("bn.running_var", "bn.count")
PLAN = Plan(
    models=("personal",), tested=("personal", "local"), numbers=("alpha",), refined=("model",), shown=(), steps=(1, 1)
)
TASK = Segmentation("organ", size=(64, 64, 64), architecture=Auto())
TERMS = Terms(
    plan=PLAN, method={}, task={}, personalised="personal", score="dice", measures={"dice": Measure()},
    ranges={"dice": (0.0, 1.0)}, codecs=None, adapts=False,
)  # fmt: skip


@dataclass
class Found:
    """What happened: ``outcomes``: "accepted", or the error's type, to how often; ``faults``: what must not be."""

    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    grown: float = 0.0
    faults: list[str] = field(default_factory=list)


def run(count: int, seed: int = 0) -> Found:
    """Try ``count`` mutations, of all kinds in turn.

    Raises:
        MedPFLError: that is none.
    """
    if count < 1:
        raise MedPFLError(f"--count must be at least 1, got {count}")
    nvflare_fobs_initialize()
    rng, found, before = random.Random(seed), Found(), _memory()
    with tempfile.TemporaryDirectory(prefix="medpfl-fuzz-") as folder:
        ways: list[Callable[[random.Random], Callable[[], None]]] = [
            *(lambda rng, pair=pair: _reply(rng, *pair) for pair in _pairs()),
            *(lambda rng, asked=asked: _request(rng, asked) for asked, _ in _pairs()),
            lambda rng: fuzz_files.state(rng, Path(folder)),
            lambda rng: fuzz_files.job(rng, Path(folder), ODD),
            *([fuzz_files.ciphertext] if fuzz_files.can_encrypt() else []),
        ]
        for number in range(count):
            _try(ways[number % len(ways)](rng), number, found)
    found.grown = _memory() - before
    if found.grown > MEMORY:
        found.faults.append(f"the process grew by {found.grown:.0f} MiB")
    return found


def _try(attempt: Callable[[], None], number: int, found: Found) -> None:
    started = time.perf_counter()
    try:
        attempt()
        found.outcomes["accepted"] += 1
    except MedPFLError as error:
        found.outcomes[type(error).__name__] += 1
        if len(str(error)) > 3000 or "\n" in str(error):
            found.faults.append(f"mutation {number}: its error is no bounded sentence: {str(error)[:200]!r}")
    except AssertionError as error:
        found.faults.append(f"mutation {number} was accepted: {error}")
    except Exception as error:  # noqa: BLE001 (any other error is what is looked for)
        found.faults.append(f"mutation {number}: {type(error).__name__}: {str(error)[:200]}")
    seconds = time.perf_counter() - started
    found.tried, found.slowest = found.tried + 1, max(found.slowest, seconds)
    if seconds > SLOWEST:
        found.faults.append(f"mutation {number} took {seconds:.1f} s")


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- honest messages --------------------------------------------------------------------------------------------------


def _slots() -> Slots:
    state = {"w": torch.ones(3, 4), "bn.running_var": torch.ones(4), "bn.count": torch.tensor(3)}
    return {"model": state}


def _pairs() -> list[tuple[Message[Any], Message[Any]]]:
    """A request and its honest reply, of every task of a training job."""
    of_run: dict[str, Any] = {"run": "r", "rounds": 2, "best": {"personal": BestRound(round=1, score=0.5)}}
    line = MetricLine(model="personal", split="validation", round=1, metrics={"dice": 0.5})
    last = line.model_copy(update={"round": 2})
    sure = Certainty(patients=9, interval=(0.4, 0.6), gain=0.1, gained=(-0.1, 0.2))
    tested = MetricLine(model="personal", split="test", round=2, metrics={"dice": 0.5}, choice="last", certainty=sure)
    chosen = ChosenModel(test=tested.model_copy(update={"choice": "best"}), gain=0.1, interval=(-0.1, 0.2))
    like = Fingerprint(cases=9, channels=1, classes=2, spacing=(1, 1, 3), fine=(1, 1, 3), shape=(90, 90, 30))
    asked = InitRequest(job="j", rounds=2, roster=("a", "b"), seed=1, threads=1, slots={"model": True}, gradients=())
    ready = InitReply(
        sizes=Sizes(train=9, validation=3, test=3), config="c", common={}, buffers=BUFFERS,
        recipe=Rebuild(method={}, task={}, input_shape=[3], preparation={}), personalised="personal", score="dice",
        measures={"dice": Measure()}, classes=("no", "yes"), versions={"torch": "2"}, plan=PLAN,
    )  # fmt: skip
    trained = TrainReply(round=2, metrics=(line,), loss={"personal": 0.1}, notes=("resumed",), seconds=1.5)
    return [
        (Message(PlanRequest(job="j")), Message(PlanReply(fingerprint=like))),
        (Message(asked), Message(ready, _slots())),
        (Message(StatisticsRequest(round=2, names=("model",), **of_run)), Message(StatisticsReply(), _slots())),
        (Message(TrainRequest(round=2, **of_run), _slots()), Message(trained, _slots())),
        (
            Message(RefineRequest(round=2, step=1, **of_run), _slots()),
            Message(RefineReply(round=2, step=1), _slots()),
        ),
        (
            Message(ValidateRequest(round=2, **of_run), _slots()),
            Message(ValidateReply(metrics=(last,), notes=())),
        ),
        (
            Message(FinishRequest(round=2, finetune=1, **of_run)),
            Message(FinishReply(metrics=(tested,), notes=(), chosen=chosen)),
        ),
    ]


# -- what is tried ----------------------------------------------------------------------------------------------------


def _reply(rng: random.Random, asked: Message[Any], honest: Message[Any]) -> Callable[[], None]:
    sent = _mutated(rng, to_shareable(honest))

    def attempt() -> None:
        message = read_reply(_carried(sent))
        header = message.header
        check_answer(asked.header, header, TERMS)
        if isinstance(header, PlanReply):
            _plan(header)
            return
        if isinstance(header, InitReply):
            begins_with(["model"])("a", message.of(InitReply))
            others = {site: Message(dataclasses.replace(honest).header, _slots()) for site in ("b", "c")}
            found = join({"a": message.of(InitReply), **others}, TERMS, 10**7, _raise)
            assert found is not None and set(found.sizes) == {"a", "b", "c"}, "it decided who takes part"
            assert 1 <= found.sizes["a"]["train"] <= 10**7, "its number of samples"
            return
        expected = table(honest.slots)
        check_update("a", message.slots, expected, BUFFERS)
        _assert_sound(asked.header, message, expected)

    return attempt


def _plan(said: PlanReply) -> None:
    """Planned together with two honest ones."""
    honest = _pairs()[0][1].header.fingerprint
    names = ("a", "b", "c")
    job, record = Job("j", 2, Settings(rounds=1), {}, FedAvg(), TASK), Record("j", names)
    with tempfile.TemporaryDirectory() as home:
        planning = Planning(job, names, Path(home), record, Quorum(record, names, 2))
        planning.take({"a": Message(said), **{site: Message(PlanReply(fingerprint=honest)) for site in names[1:]}})
    assert planning.plan is not None and max(planning.plan.size) <= 64, "no plan for the others"


def _raise(site: str, reason: str) -> None:
    assert site == "a", f"{site} was left out because of another hospital"
    raise RefusedUpdate(reason)


def _assert_sound(asked: Any, message: Message[Any], expected: Any) -> None:
    """By other means than the checks'."""
    assert table(message.slots) == expected, "other entries than asked for"
    for tensor in (tensor for state in message.slots.values() for tensor in state.values()):
        values = tensor.double().numpy()
        assert np.isfinite(values).all() and np.abs(values).max() <= LARGEST, "values out of bounds"
    if message.slots:
        assert float(message.slots["model"]["bn.running_var"].min()) >= 0, "a negative variance"
    said = message.header.model_dump()
    assert said["task"] == asked.task and said.get("round", asked.round) == asked.round, "another task or round"
    if chosen := said.get("chosen"):
        assert chosen["test"]["model"] in ("personal", "local", "average"), "a choice of something else"
        assert chosen["gain"] is None or abs(chosen["gain"]) <= 1 + 1e-6, "a gain out of range"
    for line in said.get("metrics", ()):
        numbers = [value for value in line["metrics"].values() if value is not None]
        assert line["model"] in ("personal", "local", "alpha") and "site" not in line, "a line of something else"
        assert line["model"] == "alpha" or all(-1e-6 <= value <= 1 + 1e-6 for value in numbers), "a metric out of range"
    for note in said.get("notes", ()):
        assert len(note) <= 1000 and not any(ord(letter) < 32 for letter in note), "a note with control characters"


def _request(rng: random.Random, honest: Message[Any]) -> Callable[[], None]:
    sent = _mutated(rng, to_shareable(honest))

    def attempt() -> None:
        header = read_request(_carried(sent)).header
        assert isinstance(header, Request), "no request"
        assert len(json.dumps(header.model_dump(mode="json"))) <= LONGEST, "no end"

    return attempt


# -- mutations --------------------------------------------------------------------------------------------------------


def _carried(shareable: Shareable) -> Shareable:
    """Through FLARE's serialiser; what it cannot write, somebody may write by hand."""
    try:
        written = fobs.dumps(shareable)
    except Exception:  # noqa: BLE001 (whatever it is that it cannot write)
        return shareable
    found: Shareable = fobs.loads(written)
    return found


def _mutated(rng: random.Random, honest: Shareable) -> Shareable:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        dxo = honest.get("DXO")
        if not isinstance(dxo, dict) or not isinstance(dxo.get("meta"), dict) or rng.random() < 0.02:
            honest[rng.choice(["DXO", "__headers__", "x"])] = rng.choice(ODD)
        elif rng.random() < 0.35 and isinstance(dxo["data"], dict) and dxo["data"]:
            dxo["data"] = _other_arrays(rng, dxo["data"])
        elif rng.random() < 0.05:
            dxo[rng.choice(["data", "meta", "kind"])] = rng.choice(ODD)
        else:
            text = dxo["meta"].get("medpfl")
            dxo["meta"]["medpfl"] = _other_text(rng, text) if isinstance(text, str) else text
    return honest


def _other_text(rng: random.Random, text: str) -> Any:
    place, kind = rng.randrange(len(text) + 1), rng.randrange(8)
    if kind == 0:
        return text[:place]
    if kind == 1:
        return text[:place] + chr(rng.choice((0, 34, 44, 45, 48, 91, 93, 123, 125, 0x7F, 0xE9, 0x1F600))) + text[place:]
    if kind == 2:
        return text[:place] + text[place + rng.randrange(1, 30) :]
    if kind == 3:
        return rng.choice(["[" * 5000, '{"content":' * 2000, text + text, rng.choice(ODD)])
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return text[place:]
    _change(rng, said)
    return json.dumps(said)


def _change(rng: random.Random, value: Any) -> None:
    """One place of a JSON value: another value, a further key, or none."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            value = inner
            continue
        if rng.random() < 0.7:
            value[key] = rng.choice(ODD)
        elif isinstance(value, dict):
            value[rng.choice(["site", "x", "task", str(key).upper()])] = rng.choice(ODD)
        else:
            value.append(value[0])
        return


def _other_arrays(rng: random.Random, arrays: dict[str, Any]) -> dict[str, Any]:
    found, name = dict(arrays), rng.choice(list(arrays))
    array = found[name]
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":  # it was changed already
        return found
    kinds: list[Any] = [np.float64, np.float16, np.int8, np.complex64, np.bool_, ">f4", "U4"]
    others: list[Callable[[], Any]] = [
        lambda: array.astype(rng.choice(kinds)),
        lambda: array.reshape(-1)[: rng.randrange(3)],
        lambda: array[None],
        lambda: np.full(array.shape, rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e-6, 1e18, 3e38]), np.float32),
        lambda: np.array([{}], dtype=object),
        lambda: rng.choice(ODD),
        lambda: np.zeros((0, 4), np.float32),
    ]
    if rng.random() < 0.7:
        found[name] = rng.choice(others)()
    elif rng.random() < 0.5:
        del found[name]
    else:
        found[rng.choice(["model::w", "", "::", "local::w", "model::w@b", "x" * 3000])] = array
    return found


def told(found: Found) -> str:
    """In words."""
    outcomes = ", ".join(f"{name} {count}" for name, count in found.outcomes.most_common())
    lines = [
        f"{found.tried} mutations: {outcomes}",
        f"slowest {found.slowest * 1000:.0f} ms, grown by {found.grown:.0f} MiB, faults {len(found.faults)}",
        *found.faults[:20],
    ]
    return "\n".join(lines)


def command(
    count: Annotated[int, typer.Option(help="Mutations.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the mutations.")] = 0,
) -> None:
    """Mutated replies, requests and state files through the real way in; exit code 1 if anything gets through."""
    found = run(count, seed)
    say(told(found))
    raise typer.Exit(1 if found.faults else 0)
