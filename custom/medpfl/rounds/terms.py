# SPDX-License-Identifier: Apache-2.0
"""What the server knows of a job from its own copy of it, so that no hospital decides it by what it announces."""

from collections.abc import Mapping
from dataclasses import dataclass

from medpfl.component import spec_of
from medpfl.job import Job
from medpfl.methods.references import riding_along
from medpfl.rounds.announcing import plan_of
from medpfl.rounds.protocol import Component, InitReply, Plan, as_json
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


def terms_of(job: Job) -> Terms:
    """What the server's copy of the job says."""
    ends: dict[str, Component | None] | None = None
    if job.codecs is not None:
        both = {"to_site": job.codecs.to_site, "from_site": job.codecs.from_site}
        ends = {way: as_json(spec_of(codec)) if codec else None for way, codec in both.items()}
    return Terms(
        plan=plan_of(job.method, [job.method, *riding_along(job.mixers, job.method)], job.settings.rounds),
        method=as_json(spec_of(job.method)),
        task=as_json(spec_of(job.task)),
        personalised=next(iter(job.method.deploys)),
        score=job.task.score,
        measures=job.task.measures,
        ranges={metric.name: metric.range for metric in job.task.tested},
        codecs=ends,
        adapts=bool(job.codecs and job.codecs.from_site and job.codecs.from_site.adapts),
    )
