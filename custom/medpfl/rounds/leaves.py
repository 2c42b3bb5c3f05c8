# SPDX-License-Identifier: Apache-2.0
"""What leaves a hospital in a job, generated from the types of its replies and the job's slots."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from medpfl.job import EvaluationJob, Job
from medpfl.job.codecs import TASKS
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.protocol.replies import EvaluateReply, Reply
from medpfl.rounds.terms import terms_of

_ECHOED = {"task", "round", "step"}
"""Fields that repeat what the server asked."""


@dataclass(frozen=True)
class Leaving:
    """``when``: the task of the server's request; ``what``: a field of the reply, or "tensors of" a slot or statistic;
    ``meaning``: in words."""

    when: str
    what: str
    meaning: str


def leaves_of(job: Job | EvaluationJob, hospitals: int | None = None) -> list[Leaving]:
    """Everything that a hospital's replies can hold in this job, beside the reason of a failure.

    Args:
        hospitals: how many there are in the federation; None: any number.
    """
    if isinstance(job, EvaluationJob):
        return list(_fields(EvaluateReply))
    tensors = _tensors(job, hospitals or sys.maxsize)
    found: list[Leaving] = []
    for kind in get_args(Reply):
        task = _task_of(kind)
        if (
            task == "evaluate"
            or (task == "plan" and not job.task.to_be_planned)
            or (task in ("statistics", "refine") and task not in tensors)
        ):
            continue
        found += [*_fields(kind), *tensors.get(task, [])]
        if job.codecs and task in TASKS and task != "init":
            found.append(Leaving(task, "coded", "which exchange this answers, and the codec's name"))
    return found


def _tensors(job: Job, hospitals: int) -> dict[str, list[Leaving]]:
    """Task to the tensors of its reply; a task that the job does not have is left out."""
    travelling = [slot for slot, mixer in job.mixers.items() if mixer.travels]
    rounds = range(1, job.settings.rounds + 1)
    wanted = {name for slot in travelling for number in rounds if (name := job.mixers[slot].wants(number, hospitals))}
    plan = terms_of(job).plan
    refined = [slot for slot in plan.refined if slot in travelling and any(plan.steps)]

    learnt = "what training made of them"
    if public := job.method.public_datasets():
        names = " and ".join(f"'{name}'" for name in public)
        learnt += f"; what a network says of public data, row by row, is of {names} alone"
    if job.method.privacy is not None:
        learnt += f", {job.method.privacy.told}"
    if job.filters:
        learnt += (
            f"; it passes {', '.join(job.filters)}, before which FLARE's own privacy filters act on the difference"
        )
    codec = job.codecs.from_site if job.codecs else None
    encoded = f", encoded ({type(codec).__name__})" if codec else ""
    if job.settings.encryption:
        encoded = ", encrypted: only hospitals can read it; whole numbers (counts of steps) are not"

    def of_slots(task: str, slots: list[str]) -> list[Leaving]:
        made = {slot: "gradients" if job.mixers[slot].takes == "gradients" else learnt for slot in slots}
        return [Leaving(task, f"tensors of slot '{slot}'", made[slot] + encoded) for slot in slots]

    start = [Leaving("init", f"tensors of slot '{slot}'", "initial values, equal everywhere") for slot in travelling]
    told = [Leaving("statistics", f"tensors of '{name}'", "statistics of the data") for name in sorted(wanted)]
    found = {
        "init": start,
        "statistics": told,
        "train": of_slots("train", travelling),
        "refine": of_slots("refine", refined),
    }
    return {task: listed for task, listed in found.items() if listed}


def _fields(kind: type[Part]) -> Iterator[Leaving]:
    meanings = _described(kind)
    for name in kind.model_fields:
        if name not in _ECHOED:
            yield Leaving(_task_of(kind), name, meanings[name])


def _task_of(kind: type[Part]) -> str:
    return str(kind.model_fields["task"].default)


def _described(kind: type[Part]) -> dict[str, str]:
    """Field to its sentence in the docstring of a reply's type."""
    attributes = (kind.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^        (\w+): (.*(?:\n {9,}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".").replace("``", "'") for name, text in found}


def as_table(found: list[Leaving]) -> str:
    """As Markdown."""
    rows = [f"| {one.when} | {one.what} | {one.meaning} |" for one in found]
    return "\n".join(["| asked to | leaves | what it is |", "|---|---|---|", *rows])
