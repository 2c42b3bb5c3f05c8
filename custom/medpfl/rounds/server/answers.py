# SPDX-License-Identifier: Apache-2.0
"""Which of the hospitals' replies are answers to what they were asked, and say no more than that."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from medpfl.core.errors import ProtocolError, RefusedUpdate
from medpfl.methods.references import AVERAGE, LOCAL
from medpfl.privacy.contract import Spent
from medpfl.results.line import ChosenModel, MetricLine
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.protocol.replies import EvaluateReply, FinishReply, RefineReply, Reply, TrainReply, ValidateReply
from medpfl.rounds.protocol.requests import (
    EvaluateRequest,
    FinishRequest,
    RefineRequest,
    Request,
    TrainRequest,
    ValidateRequest,
)
from medpfl.rounds.terms import Range, Terms
from medpfl.tasks.metrics.certainty import Interval

A = TypeVar("A", bound=Part)
Check = Callable[[str, Message[A]], None]
"""Looks at a hospital's tensors; raises RefusedUpdate."""

_ROUNDING = 1e-6
"""By so much a metric may be outside its range: its mean over cases is rounded."""


def answers(
    asked: Request,
    kind: type[A],
    replies: Mapping[str, Message[Reply]],
    terms: Terms | None,
    check: Check[A],
    refuse: Callable[[str, str], None],
) -> dict[str, Message[A]]:
    """Those replies, by hospital and sorted, that answer what was asked and pass ``check``.

    Args:
        kind: what answers it.
        terms: what the server knows of the job; None where it evaluates a model that may be of another package.
        refuse: is told who is left out, and why.
    """
    accepted = {}
    for site in sorted(replies):
        try:
            check_answer(asked, replies[site].header, terms)
            reply = replies[site].of(kind)
            check(site, reply)
        except (ProtocolError, RefusedUpdate) as error:
            refuse(site, str(error))
            continue
        accepted[site] = reply
    return accepted


def no_tensors(site: str, reply: Message[Part]) -> None:
    """An answer that is metrics only.

    Raises:
        RefusedUpdate: naming the hospital.
    """
    if reply.slots:
        raise RefusedUpdate(f"{site}: it sent tensors, and metrics only were asked for")


def check_answer(asked: Request, reply: Reply, terms: Terms | None = None) -> None:
    """A reply must be of what was asked: the task, the round, and lines of the job's models and metrics, each once.

    Args:
        terms: as in ``answers``.

    Raises:
        ProtocolError: one sentence.
    """
    if asked.task != reply.task:
        raise ProtocolError(f"it was asked to '{asked.task}' and answered to '{reply.task}'")
    match asked, reply:
        case RefineRequest(), RefineReply():
            _check_same("round", asked.round, reply.round)
            _check_same("step", asked.step, reply.step)
        case TrainRequest(), TrainReply():
            _check_same("round", asked.round, reply.round)
            _check_validation(reply.metrics, asked.round - 1, terms)
            _check_losses(reply, terms)
            _check_spent(reply.privacy, terms)
        case ValidateRequest(), ValidateReply():
            _check_validation(reply.metrics, asked.round, terms)
        case FinishRequest(), FinishReply():
            _check_tests(reply.metrics, asked, terms)
            _check_chosen(reply.chosen, asked, terms)
            _check_spent(reply.privacy, terms)
        case EvaluateRequest(), EvaluateReply():
            line = reply.metrics[0]
            if (line.model, line.split, line.round, line.choice) != (asked.recipe.deployed, "test", 0, "given"):
                raise ProtocolError("its metrics are not of the given model's test")
            if line.certainty is not None:
                raise ProtocolError("it tells how sure the given model's score is, which it was not asked")


def _check_same(what: str, asked: int, answered: int) -> None:
    if asked != answered:
        raise ProtocolError(f"it was asked for {what} {asked} and answered of {what} {answered}")


def _check_validation(lines: Sequence[MetricLine], round_number: int, terms: Terms | None) -> None:
    models, numbers = (terms.plan.models, terms.plan.numbers) if terms else ((), ())
    _check_once([line.model for line in lines])
    for line in lines:
        if (line.split, line.round, line.choice) != ("validation", round_number, None) or not line.round:
            raise ProtocolError(f"a line of '{line.model}' is not of the validation of round {round_number}")
        if line.certainty is not None:
            raise ProtocolError(f"it tells how sure the validation of '{line.model}' is, which it was not asked")
        if line.model in models:
            _check_values(line, terms)
        elif not (line.model in numbers and list(line.metrics) == [line.model]):
            raise ProtocolError(f"it tells of '{line.model}', which is not of the job's method")


def _check_tests(lines: Sequence[MetricLine], asked: FinishRequest, terms: Terms | None) -> None:
    _check_once([f"{line.model}, {line.choice}" for line in lines])
    rounds = {"last": {asked.round}, "best": {asked.round, *(best.round for best in asked.best.values())}}
    for line in lines:
        if line.split != "test" or line.choice not in rounds or line.round not in rounds[line.choice]:
            raise ProtocolError(f"a line of '{line.model}' is not of the test of a best or the last round")
        if terms is None or line.model not in terms.plan.tested:
            raise ProtocolError(f"it tells of '{line.model}', which is not of the job's method")
        _check_values(line, terms)


def _check_chosen(chosen: ChosenModel | None, asked: FinishRequest, terms: Terms | None) -> None:
    if chosen is None:
        return
    if terms is None or LOCAL not in terms.plan.tested:
        raise ProtocolError("it chose a model, and no local model rides along in this job")
    line = chosen.test
    if line.model == AVERAGE and (line.split, line.round, line.choice) == ("test", asked.round, "best"):
        _check_values(line, terms)
    else:
        _check_tests([line], asked, terms)
    _check_interval(line.model, chosen.interval, chosen.gain, _of_gains(terms))


def _check_certainty(line: MetricLine, terms: Terms | None) -> None:
    """Intervals lie within the range of the score, or of its differences."""
    if line.certainty is None or terms is None:
        return
    found, value = line.certainty, line.metrics.get(terms.score)
    if value is None:
        raise ProtocolError(f"it tells how sure the {terms.score} of '{line.model}' is, and not the {terms.score}")
    _check_interval(line.model, found.interval, None, terms.ranges[terms.score])
    _check_interval(line.model, found.gained, found.gain, _of_gains(terms))


def _of_gains(terms: Terms) -> Range:
    least, largest = terms.ranges[terms.score]
    return least - largest, largest - least


def _check_interval(model: str, interval: Interval | None, value: float | None, span: Range) -> None:
    every = [*(interval or ()), *([] if value is None else [value])]
    if not all(span[0] - _ROUNDING <= one <= span[1] + _ROUNDING for one in every):
        raise ProtocolError(f"an interval of '{model}' is not between {span[0]:g} and {span[1]:g}")
    if interval is not None and interval[0] > interval[1]:
        raise ProtocolError(f"an interval of '{model}' ends before it begins")


def _check_values(line: MetricLine, terms: Terms | None) -> None:
    _check_certainty(line, terms)
    check_metrics(line, terms.ranges if terms else {})


def check_metrics(line: MetricLine, ranges: Mapping[str, Range]) -> None:
    """Metrics of the task, within their ranges.

    Args:
        ranges: metric to its least and its largest possible value.

    Raises:
        ProtocolError: one sentence.
    """
    for name, value in line.metrics.items():
        if name not in ranges:
            raise ProtocolError(f"it tells of '{line.model}' by '{name}', which is no metric of the job's task")
        if value is not None:
            check_within(f"{name} of '{line.model}'", value, ranges[name])


def check_within(what: str, value: float, span: Range) -> None:
    """Raises ProtocolError: a value is outside the range of its metric."""
    if not span[0] - _ROUNDING <= value <= span[1] + _ROUNDING:
        raise ProtocolError(f"its {what} is not between {span[0]:g} and {span[1]:g}")


def _check_losses(reply: TrainReply, terms: Terms | None) -> None:
    for name in reply.loss:
        if terms is None or name not in terms.plan.models:
            raise ProtocolError(f"it tells the training loss of '{name}', which is not of the job's method")


def _check_spent(said: Spent | None, terms: Terms | None) -> None:
    """What noise has cost is told where there is noise, and at the job's delta: at a larger one epsilon is small."""
    delta = terms.delta if terms else None
    if said is None:
        if delta is not None:
            raise ProtocolError("it does not tell what its noise has cost")
    elif delta is None:
        raise ProtocolError("it tells what noise has cost, and this job asks for none")
    elif said.delta != delta:
        raise ProtocolError(f"it tells its epsilon at delta {said.delta:g}, and was asked for {delta:g}")


def _check_once(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ProtocolError(f"it tells twice of '{name}'")
