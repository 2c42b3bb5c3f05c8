# SPDX-License-Identifier: Apache-2.0
"""What the server knows of a job from its own copy of it, so that no hospital decides it by what it announces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from medpfl.component import spec_of
from medpfl.job import Job
from medpfl.methods.contract import Method
from medpfl.methods.references import riding_along
from medpfl.rounds.announcing import fine_tuned_name, plan_of
from medpfl.rounds.protocol.bounded import Component, as_json
from medpfl.rounds.protocol.replies import InitReply, Plan
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
        encrypted: whether the hospitals encrypt what they send.
        scored: model to after what it is evaluated: the mixing, or local steps.
        agreed: digest of the schema that the job names.
        delta: at which hospitals tell what their noise has cost; None: the job asks for no noise.
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
    encrypted: bool = False
    scored: Mapping[str, str] = field(default_factory=dict)
    agreed: str | None = None
    delta: float | None = None

    def difference(self, reply: InitReply) -> str | None:
        """The first thing of which a hospital says something else; None: there is nothing."""
        for name in ("codecs", "adapts", "score", "measures", "personalised", "plan"):
            if getattr(reply, name) != getattr(self, name):
                return name
        return None if (reply.encryption is not None) == self.encrypted else "encryption"


def terms_of(job: Job) -> Terms:
    """What the server's copy of the job says."""
    ends: dict[str, Component | None] | None = None
    if job.codecs is not None:
        both = {"to_site": job.codecs.to_site, "from_site": job.codecs.from_site}
        ends = {way: as_json(spec_of(codec)) if codec else None for way, codec in both.items()}
    methods = [job.method, *riding_along(job.mixers, job.method)]
    return Terms(
        plan=plan_of(job.method, methods, job.settings.rounds),
        method=as_json(spec_of(job.method)),
        task=as_json(spec_of(job.task)),
        personalised=next(iter(job.method.deploys)),
        score=job.task.score,
        measures=job.task.measures,
        ranges={metric.name: metric.range for metric in job.task.tested},
        codecs=ends,
        adapts=bool(job.codecs and job.codecs.from_site and job.codecs.from_site.adapts),
        encrypted=job.settings.encryption is not None,
        scored=_scored(methods, job.settings.finetune),
        agreed=job.settings.schema,
        delta=job.method.privacy.delta if job.method.privacy else None,
    )


def _scored(methods: Sequence[Method], finetune: int) -> dict[str, str]:
    found = {}
    for method in methods:
        for name in method.deploys:
            found[name] = "local steps" if name in method.after_steps else "mixing"
        if method.fine_tuned is not None and finetune:
            more = "1 local round" if finetune == 1 else f"up to {finetune} local rounds"
            found[fine_tuned_name(method.fine_tuned)] = f"mixing and {more} more"
    return found
