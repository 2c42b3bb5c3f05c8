# SPDX-License-Identifier: Apache-2.0
"""A hospital's own rules for jobs, in its site file; a job has no say in them.

policy:                               # optional, as is every key; what is not said has the default
  least_samples: 20
  most_rounds: 100
  methods: [medpfl.methods.softpull.SoftPull, medpfl.methods.local.Local]
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from medpfl.data.declared import Strict


def _no_truth(value: object) -> object:
    """A text is read as a number, for YAML takes 1e-5 for one; yes is not read as 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Number = Annotated[float, BeforeValidator(_no_truth), Field(gt=0, allow_inf_nan=False)]
AtLeastOne = Annotated[int, Field(ge=1, strict=True)]
ClassName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$", max_length=200)]

Line = Annotated[str, StringConstraints(pattern=r"^[a-z]+ \S.*$", max_length=400)]


class Policy(Strict):
    """What a job must keep to at this hospital. The defaults hold where the site file says nothing.

    Attributes:
        least_samples: of the training part, for taking part in a job that trains.
        least_update: different training samples behind every update that leaves, hence steps x batch size, none of
            which may have nearly all the weight. Of one step on 4 images an attacker computes some
            (docs/results/attacks.md); 8 are a floor and no protection of each.
        least_statistic: samples behind a statistic of the training part that a job asks for.
        least_count: cases of a class, or rows of a category, behind its share where a job asks for shares; what fewer
            have is told as what most have.
        least_scored: cases of a validation or test split whose scores leave, of as many patients or recordings where
            the dataset groups cases; one that has fewer, and not none, is a reason not to take part. Of a training
            batch of fewer, counted alike, the loss is not told.
        least_hospitals: in a job, this one among them.
        most_rounds: of a job.
        most_steps: batches of a hospital's training in a round, for each method and each of its passes; of a method
            that takes several steps on a batch, steps.
        most_finetune: rounds of fine-tuning after the last round.
        most_threads: of the processor.
        most_parameters: of all networks of a job together, buffers included.
        most_megabytes: of these networks, in units of 2**20 bytes.
        methods: full class names of the methods a job may train by, the references that ride along included; None: all
            that the startup kit allows.
        tasks: likewise of what is learnt.
        filters: full class names of FLARE filters that must stand between this hospital and the server, for all that
            leaves: in the hospital's own ``privacy.json``, or in the job's configuration.
        privacy: the noise that a job must have: "record" (DPSGD; ClippedNoise hides single cases too) or "update"
            (ClippedNoise); None: none.
        most_epsilon: what the noise of all jobs here may cost together, at ``delta``; a job without noise is refused.
            None: there is no limit.
        delta: in (0, 1).
        encrypted: whether a job that trains must encrypt models (its controller's ``encryption``).
        kept_here: lines of ``medpfl leaves``, "train loss", say, that never leave. Replies go without what they can
            lack (losses, durations, notes, what was chosen); a job that needs another one of them goes on without this
            hospital.
    """

    least_samples: AtLeastOne = 8
    least_update: AtLeastOne = 8
    least_statistic: AtLeastOne = 5
    least_count: AtLeastOne = 5
    least_scored: AtLeastOne = 2
    least_hospitals: AtLeastOne = 2
    most_rounds: AtLeastOne = 1000
    most_steps: AtLeastOne = 100_000
    most_finetune: Annotated[int, Field(ge=0, strict=True)] = 100
    most_threads: AtLeastOne = 64
    most_parameters: AtLeastOne = 500_000_000
    most_megabytes: AtLeastOne = 2048
    methods: tuple[ClassName, ...] | None = None
    tasks: tuple[ClassName, ...] | None = None
    filters: tuple[ClassName, ...] = ()
    privacy: Literal["record", "update"] | None = None
    most_epsilon: Number | None = None
    delta: Annotated[Number, Field(lt=1)] = 1e-5
    encrypted: Annotated[bool, Field(strict=True)] = False
    kept_here: tuple[Line, ...] = ()

    def described(self) -> Iterator[str]:
        """One line for each rule: the key, its value, and whether the site file says so."""
        for key in type(self).model_fields:
            value = getattr(self, key)
            shown = "any" if value is None else ", ".join(value) or "none" if isinstance(value, tuple) else value
            yield f"{key}: {shown}" + ("" if key in self.model_fields_set else " (default)")


STUDY = Policy(least_samples=1, least_update=1, least_statistic=1, least_count=1, least_scored=1, least_hospitals=1)
"""For studies in one process on data that lie here anyway, as a comparison's pooled training: nothing leaves."""
