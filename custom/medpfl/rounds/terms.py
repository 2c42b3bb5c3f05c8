# SPDX-License-Identifier: Apache-2.0
"""What the server knows of a job from its own copy of it, so that no hospital decides it by what it announces."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from medpfl.component import spec_of
from medpfl.methods.base import Method
from medpfl.methods.references import riding_along
from medpfl.rounds.announcing import plan_of
from medpfl.rounds.coding import Codecs
from medpfl.rounds.protocol import Component, InitReply, Plan, as_json
from medpfl.tasks.base import Task
from medpfl.tasks.metrics.measure import Measure

Range = tuple[float, float]


@dataclass(frozen=True)
class Terms:
    """What a job's method and task say.

    Attributes:
        plan: what is told and asked for.
        method: the method's configuration, and ``task``: the task's.
        personalised: the model that the method is there for.
        score: the metric that chooses rounds.
        measures: metric to which of its values are better, and their unit.
        ranges: metric to its least and its largest possible value.
        codecs: by direction; None: the job has none.
        adapts: whether one of them goes by the job's progress.
    """

    plan: Plan
    method: Component
    task: Component
    personalised: str
    score: str
    measures: Mapping[str, Measure]
    ranges: Mapping[str, Range]
    codecs: Mapping[str, Component | None] | None
    adapts: bool

    def difference(self, reply: InitReply) -> str | None:
        """The first thing of which a hospital says something else; None: there is nothing."""
        for name in ("codecs", "adapts", "score", "measures", "personalised", "plan"):
            if getattr(reply, name) != getattr(self, name):
                return name
        return None


def terms_of(method: Method, task: Task, slots: Iterable[str], rounds: int, codecs: Codecs | None = None) -> Terms:
    """The terms of a job.

    Args:
        slots: those of the job, the references' among them.
    """
    ends: dict[str, Component | None] | None = None
    if codecs is not None:
        both = {"to_site": codecs.to_site, "from_site": codecs.from_site}
        ends = {way: as_json(spec_of(codec)) if codec else None for way, codec in both.items()}
    return Terms(
        plan=plan_of(method, [method, *riding_along(slots, method)], rounds),
        method=as_json(spec_of(method)),
        task=as_json(spec_of(task)),
        personalised=next(iter(method.deploys)),
        score=task.score,
        measures=task.measures,
        ranges={metric.name: metric.range for metric in task.metrics},
        codecs=ends,
        adapts=bool(codecs and codecs.from_site and codecs.from_site.adapts),
    )
