# SPDX-License-Identifier: Apache-2.0
"""What leaves a hospital in a job, generated from the types of its replies and the job's slots."""

import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from medpfl.job import EvaluationJob, Job
from medpfl.job.codecs import TASKS
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.protocol.replies import EvaluateReply, Reply
from medpfl.rounds.terms import terms_of

_ECHOED = {"task", "round", "step"}
"""Fields that repeat what the server asked."""


SERVER = "the server, and the lead in its results"
_ANY_TWO = ("a", "b")
_WITHHELD = "nothing: a job that asks for privacy keeps training losses here"


@dataclass(frozen=True)
class Size:
    """Of tensors that leave together, before a codec or encryption: ``shapes`` by name, and ``bytes`` of all."""

    shapes: Mapping[str, tuple[int, ...]]
    bytes: int

    def __str__(self) -> str:
        values = sum(math.prod(shape) for shape in self.shapes.values())
        return f"{len(self.shapes)} tensors, {values} numbers, {self.bytes} bytes"


@dataclass(frozen=True)
class Leaving:
    """``when``: the task of the server's request; ``what``: a field of the reply, or "tensors of" a slot or statistic;
    ``meaning``: in words; ``often``: how many times in a run in which nothing is done again; ``shown``: to whom;
    ``size``: of tensors; None: it is of a few bytes, or only the hospital's data say it."""

    when: str
    what: str
    meaning: str
    often: str
    shown: str
    size: Size | None = None


def leaves_of(
    job: Job | EvaluationJob, hospitals: int | None = None, sizes: Mapping[str, Size] | None = None
) -> list[Leaving]:
    """Everything that a hospital's replies can hold in this job, beside the reason of a failure.

    Args:
        hospitals: how many there are in the federation; None: any number.
        sizes: of the slots, where they are known.
    """
    if isinstance(job, EvaluationJob):
        return list(_fields(EvaluateReply, "once"))
    tensors = _tensors(job, hospitals or sys.maxsize, sizes or {})
    times = _times(job, hospitals or sys.maxsize)
    found: list[Leaving] = []
    for kind in get_args(Reply):
        task = _task_of(kind)
        if (
            task == "evaluate"
            or (task == "plan" and not job.task.to_be_planned)
            or (task in ("statistics", "refine") and task not in tensors)
        ):
            continue
        found += [*_fields(kind, times[task]), *tensors.get(task, [])]
        if job.codecs and task in TASKS and task != "init":
            told = "which exchange this answers, and the codec's name"
            found.append(Leaving(task, "coded", told, times[task], "the server"))
    if job.method.privacy is not None:
        found = [replace(one, meaning=_WITHHELD) if (one.when, one.what) == ("train", "loss") else one for one in found]
    elif numbers := ", ".join(terms_of(job).plan.numbers):
        told = f"; beside them the method's own numbers about its models: {numbers}"
        lines = (("train", "metrics"), ("validate", "metrics"))
        found = [replace(one, meaning=one.meaning + told) if (one.when, one.what) in lines else one for one in found]
    return found


def _times(job: Job, hospitals: int) -> dict[str, str]:
    """Task to how often it is asked for."""
    rounds = range(1, job.settings.rounds + 1)
    mixers = [mixer for mixer in job.mixers.values() if mixer.travels]
    asked = sum(any(mixer.wants(number, hospitals) for mixer in mixers) for number in rounds)
    at_most = "" if job.settings.hospitals_per_round is None else "at most "  # who is asked is drawn for each round
    return {
        "plan": "once, before a new run",
        "init": "once, and again when a run is resumed",
        "statistics": _count(asked) if asked < 2 else f"at most {_count(asked)}",  # some are asked for until known
        "train": at_most + _count(len(rounds)),
        "refine": at_most + _count(sum(terms_of(job).plan.steps)),
        "validate": "once",
        "finish": "once",
    }


def _count(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _tensors(job: Job, hospitals: int, sizes: Mapping[str, Size]) -> dict[str, list[Leaving]]:
    """Task to the tensors of its reply; a task that the job does not have is left out."""
    travelling = [slot for slot, mixer in job.mixers.items() if mixer.travels]
    rounds = range(1, job.settings.rounds + 1)
    wanted = {name for slot in travelling for number in rounds if (name := job.mixers[slot].wants(number, hospitals))}
    plan, times = terms_of(job).plan, _times(job, hospitals)
    refined = [slot for slot in plan.refined if slot in travelling and any(plan.steps)]

    def line(task: str, slot: str, meaning: str, shown: str) -> Leaving:
        return Leaving(task, f"tensors of slot '{slot}'", meaning, times[task], shown, sizes.get(slot))

    def of_slots(task: str, slots: list[str]) -> list[Leaving]:
        shown = _shown_to(job, plan.shown)
        return [line(task, slot, _learnt(job, slot), shown[slot]) for slot in slots]

    initial = "initial values, equal everywhere"
    if start := job.method.start:
        initial += f"; of the task's networks the weights of the site file's checkpoint '{start.checkpoint}'"
        initial += ", without noise" if job.method.privacy is not None else ""
    if job.settings.encryption:
        initial = "zeros in the shapes of the initial values; whole numbers (counts of steps) as they are"
    told = [
        Leaving("statistics", f"tensors of '{name}'", "statistics of the data", times["statistics"], "the server")
        for name in sorted(wanted)
    ]
    found = {
        "init": [line("init", slot, initial, "the server") for slot in travelling],
        "statistics": told,
        "train": of_slots("train", travelling),
        "refine": of_slots("refine", refined),
    }
    return {task: listed for task, listed in found.items() if listed}


def _learnt(job: Job, slot: str) -> str:
    """What the tensors of a slot are, and as what they travel."""
    learnt = "gradients" if job.mixers[slot].takes == "gradients" else "what training made of them"
    if public := job.method.public_datasets():
        names = " and ".join(f"'{name}'" for name in public)
        learnt += f"; what a network says of public data, row by row, is of {names} alone"
    if job.method.privacy is not None:
        learnt += f", {job.method.privacy.told}"
    if job.filters:
        learnt += (
            f"; it passes {', '.join(job.filters)}, before which FLARE's own privacy filters act on the difference"
        )
    if job.settings.encryption:
        return learnt + ", encrypted: only hospitals can read it; whole numbers (counts of steps) are not"
    codec = job.codecs.from_site if job.codecs else None
    return learnt + (f", encoded ({type(codec).__name__})" if codec else "")


def _shown_to(job: Job, apart: Collection[str]) -> dict[str, str]:
    """Slot to who gets to see what a hospital sends of it; ``apart``: slots of which hospitals are shown all models."""
    joint = job.method.joint(_ANY_TWO)
    whole = {slot for slot, whose in joint.sources().values() if whose} if joint else set()
    found = {}
    for slot, mixer in job.mixers.items():
        told = "the other hospitals, mixed" if job.settings.encryption else f"{SERVER}; the other hospitals, mixed"
        if slot in apart:
            told += ", and each hospital's by itself"
        if mixer.apart:
            told += f", and by itself {mixer.apart}"
        if slot in whole:
            told += "; by itself whoever gets the job's super model"
        found[slot] = told
    return found


def _fields(kind: type[Part], often: str) -> Iterator[Leaving]:
    meanings = _described(kind)
    for name in kind.model_fields:
        if name not in _ECHOED:
            yield Leaving(_task_of(kind), name, meanings[name], often, SERVER)


def _task_of(kind: type[Part]) -> str:
    return str(kind.model_fields["task"].default)


def _described(kind: type[Part]) -> dict[str, str]:
    """Field to its sentence in the docstring of a reply's type."""
    attributes = (kind.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^        (\w+): (.*(?:\n {9,}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".").replace("``", "'") for name, text in found}


def as_table(found: list[Leaving]) -> str:
    """As Markdown."""
    rows = [f"| {one.when} | {one.what} | {one.meaning} | {one.often} | {one.shown} |" for one in found]
    return "\n".join(["| asked to | leaves | what it is | how often | who sees it |", "|---|---|---|---|---|", *rows])
