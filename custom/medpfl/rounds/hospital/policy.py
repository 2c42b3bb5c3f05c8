# SPDX-License-Identifier: Apache-2.0
"""A hospital asks its own policy before it does what a job wants."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from medpfl.component import find_class
from medpfl.core.errors import PolicyRefused
from medpfl.core.sizes import Bounded, TooLarge
from medpfl.data.policy import Policy
from medpfl.data.samples import SiteData
from medpfl.methods.contract import Method, Site
from medpfl.methods.training import Training
from medpfl.privacy.contract import Privacy
from medpfl.rounds.protocol.requests import FinishRequest, InitRequest, OfRun
from medpfl.tasks.contract import Task

EVEN = 0.75
"""Part of ``least_update`` that samples must be, counted by their weights (``EffectiveSamples.effective``): a last
batch that is smaller, or a learning rate that falls, weighs some more than others in any training."""


def check_named(policy: Policy) -> None:
    """Whether all that the policy names by a class exists, so that a typing error is seen before a job is refused.

    Classes of other packages are not looked for: they need not be installed where the site file is looked at.

    Raises:
        ConfigError: one of MedPFL's classes does not exist; with the rule's key.
    """
    for key, named in (("methods", policy.methods), ("tasks", policy.tasks)):
        for path in named or ():
            if path.startswith("medpfl."):
                find_class(path, f"this hospital's policy ('{key}')")


def check_classes(policy: Policy, methods: Sequence[Method], task: Task, filters: Sequence[str]) -> None:
    """Whether the job's classes are among those that the hospital names.

    Args:
        methods: the job's, then the references.
        filters: full class names of those through which everything goes that leaves.

    Raises:
        PolicyRefused: one is not; with the rule's key.
    """
    for key, allowed, used in (("methods", policy.methods, methods), ("tasks", policy.tasks, [task])):
        for one in used:
            if allowed is not None and _name(one) not in allowed:
                raise PolicyRefused(f"this hospital's policy ('{key}') does not allow {_name(one)}")
    for name in policy.filters:
        if name not in filters:
            raise PolicyRefused(f"this hospital's policy ('filters') asks for the filter {name}, which is not there")


def check_privacy(policy: Policy, how: Privacy | None) -> None:
    """Whether the job's noise is what the hospital asks for. That of updates hides single cases too.

    Raises:
        PolicyRefused: with the rule's key.
    """
    if policy.privacy is not None and (how is None or (policy.privacy, how.level) == ("update", "record")):
        kinds = "ClippedNoise" if policy.privacy == "update" else "DPSGD or ClippedNoise"
        got = "none" if how is None else type(how).__name__
        raise PolicyRefused(
            f"this hospital's policy ('privacy') asks for noise of the level '{policy.privacy}' ({kinds}) as the "
            f"method's 'privacy'; this job has {got}"
        )
    if policy.most_epsilon is not None and how is None:
        raise PolicyRefused(
            f"this hospital's policy ('most_epsilon') allows at most {policy.most_epsilon:g}; this job has no noise"
        )


def check_start(policy: Policy, header: InitRequest) -> None:
    """Whether the job as a whole is one for this hospital; before any data are read.

    Raises:
        PolicyRefused: with the rule's key.
    """
    check_hospitals(policy, min(len(set(header.roster)), header.asked or len(header.roster)))
    check_length(policy, header.rounds, header.finetune)
    check_threads(policy, header.threads)
    check_encrypted(policy, header.encryption)


def check_encrypted(policy: Policy, encryption: str | None) -> None:
    """Raises PolicyRefused: the job would show this hospital's models to the server."""
    if policy.encrypted and encryption is None:
        raise PolicyRefused("this hospital's policy ('encrypted') asks for models that the server cannot see")


def check_hospitals(policy: Policy, count: int) -> None:
    """Raises PolicyRefused: so few take part."""
    _least("least_hospitals", policy.least_hospitals, count, "hospitals in a job", "has")


def check_length(policy: Policy, rounds: int, finetune: int = 0) -> None:
    """Raises PolicyRefused: the job takes too many rounds, or too many of fine-tuning."""
    _most("most_rounds", policy.most_rounds, rounds, "rounds")
    _most("most_finetune", policy.most_finetune, finetune, "rounds of fine-tuning")


def check_threads(policy: Policy, threads: int) -> None:
    """Raises PolicyRefused: the job asks for too many."""
    _most("most_threads", policy.most_threads, threads, "threads")


def check_data(policy: Policy, data: SiteData, methods: Sequence[Method]) -> None:
    """Whether there are enough data, and whether the methods as they stand in the job would use enough of them.

    Raises:
        PolicyRefused: with the rule's key; it does not tell how many samples there are.
    """
    count = len(data.splits["train"])
    if count < policy.least_samples:
        raise PolicyRefused(
            f"this hospital's policy ('least_samples') asks for at least {policy.least_samples} training samples, and "
            "it has fewer of this dataset"
        )
    check_scored(policy, data)
    for method in methods:
        kind = type(method).__name__
        what = f"batches a round ({kind})"
        if method.steps:
            _most("most_steps", policy.most_steps, method.steps, what)
            check_update(policy, method, method.steps * method.batch_size)
        elif Training.batches(method, count) > policy.most_steps:
            raise PolicyRefused(
                f"this hospital's policy ('most_steps') allows at most {policy.most_steps} {what}; {method.epochs} "
                "epochs here are more"
            )
        check_passes(policy, method, count)
        if count < policy.least_update:
            raise PolicyRefused(
                f"this hospital's policy ('least_update') asks for at least {policy.least_update} training samples "
                f"behind an update, {kind}; the hospital has fewer"
            )


def check_passes(policy: Policy, method: Method, samples: int, public: int = 0) -> None:
    """Raises PolicyRefused: a pass beside the usual one (over a head, in a distillation) is longer than allowed."""
    if method.batches(samples, public) > policy.most_steps:
        raise PolicyRefused(
            f"this hospital's policy ('most_steps') allows at most {policy.most_steps} batches a round "
            f"({type(method).__name__}); a pass of this job takes more steps"
        )


def check_scored(policy: Policy, data: SiteData) -> None:
    """Whether the scores that are to leave are of enough cases, of as many patients where the site file says whose they
    are: that of a single one is its patient's result.

    Raises:
        PolicyRefused: with the rule's key and the split; it does not tell how many cases there are.
    """
    for split in ("validation", "test"):
        samples = data.splits[split]
        known = samples.known  # a case without any label is in no score
        alone = "; a hospital whose only recording is cut by time says 'least_scored: 1' in its own policy"
        for count, what, mend in (
            (int(known.sum()), "scored cases", ""),
            (len(set(samples.patients[known].tolist())), "patients or recordings whose cases are scored", alone),
        ):
            if 0 < count < policy.least_scored:
                raise PolicyRefused(
                    f"this hospital's policy ('least_scored') asks for at least {policy.least_scored} {what}, and its "
                    f"{split} split has fewer{mend}"
                )


def check_update(policy: Policy, method: object, drawn: int) -> None:
    """Raises PolicyRefused: what is to leave was learnt from too few samples."""
    what = f"training samples behind an update, {type(method).__name__}"
    _least("least_update", policy.least_update, drawn, what, "takes")


def check_round(policy: Policy, header: OfRun) -> None:
    """Whether a request within a run keeps to the policy, whatever was said in the beginning.

    Raises:
        PolicyRefused: with the rule's key.
    """
    finetune = header.finetune if isinstance(header, FinishRequest) else 0
    check_length(policy, max(header.round, header.rounds), finetune)


def check_trained(policy: Policy, site: Site) -> None:
    """Whether every phase of a local round has seen enough samples, and not a few of them decide what a network has
    learnt; what was learnt does not leave otherwise.

    Raises:
        PolicyRefused: as ``check_update``.
    """
    for drawn in site.drawn:
        if site.in_lots and drawn < policy.least_update:  # how many the secret lots held is told to nobody
            raise PolicyRefused(
                f"this hospital's policy ('least_update') asks for at least {policy.least_update} training samples "
                f"behind an update, {type(site.method).__name__}; this round's lots held fewer"
            )
        check_update(policy, site.method, drawn)
    half = ", or because fp16 left out most of the steps" if site.method.precision == "fp16" else ""
    for behind in site.behind.values():
        if round(behind.effective, 6) < EVEN * policy.least_update:  # sums may round either way
            raise PolicyRefused(
                f"this hospital's policy ('least_update') asks for at least {policy.least_update} training samples "
                f"behind an update, {type(site.method).__name__}; in this job few of them have nearly all the weight, "
                f"by its schedule, its pull back to the start, its decay or its weights of classes{half}"
            )


def may_tell_loss(policy: Policy, site: Site) -> bool:
    """Whether the training loss that is reported is of enough patients; that of a single one is told to nobody."""
    return site.loss_of is None or site.loss_of >= policy.least_scored


def check_statistic(policy: Policy, samples: int) -> None:
    """Raises PolicyRefused: a statistic of so few samples tells of single ones."""
    if samples < policy.least_statistic:
        raise PolicyRefused(
            f"this hospital's policy ('least_statistic') asks for at least {policy.least_statistic} samples behind a "
            "statistic, and it has fewer"
        )


@contextmanager
def building(policy: Policy) -> Iterator[None]:
    """While it is entered, networks that are too large are refused before their memory is taken.

    Raises:
        PolicyRefused: they are.
    """
    try:
        with Bounded(policy.most_parameters):
            yield
    except TooLarge as error:
        raise PolicyRefused(
            f"this hospital's policy ('most_parameters') allows at most {policy.most_parameters} parameters; this "
            "job's networks have more"
        ) from error


def check_networks(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """Raises PolicyRefused: the networks whose entries these are take too much."""
    tensors = state.values()
    _most("most_parameters", policy.most_parameters, sum(tensor.numel() for tensor in tensors), "parameters")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    _most("most_megabytes", policy.most_megabytes, math.ceil(size / 2**20), "MiB of networks")


def _least(key: str, least: int, got: int, what: str, verb: str) -> None:
    if got < least:
        raise PolicyRefused(f"this hospital's policy ('{key}') asks for at least {least} {what}; this job {verb} {got}")


def _most(key: str, most: int, got: int, what: str) -> None:
    if got > most:
        raise PolicyRefused(f"this hospital's policy ('{key}') allows at most {most} {what}; this job wants {got}")


def _name(component: Method | Task) -> str:
    kind = type(component)
    return f"{kind.__module__}.{kind.__qualname__}"
