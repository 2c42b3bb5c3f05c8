# SPDX-License-Identifier: Apache-2.0
"""A job whose network is planned when it starts: hospitals tell what their volumes are like, the server plans, and all
are told the plan with the first request.

The plan is part of the run's state at the server: a run that is taken up again has the plan that it began with.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from medpfl.component import spec_of
from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError, MedPFLError, RefusedUpdate
from medpfl.data.contract import Dataset
from medpfl.data.fingerprint import Fingerprint, Planned
from medpfl.data.site_file import SiteFile
from medpfl.job.contents import Job
from medpfl.methods.contract import Method
from medpfl.results.record import Record
from medpfl.rounds.hospital import policy
from medpfl.rounds.likeness import of_fingerprints
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import PlanReply, Reply
from medpfl.rounds.protocol.requests import PlanRequest
from medpfl.rounds.server.answers import answers, no_tensors
from medpfl.rounds.server.quorum import Quorum
from medpfl.tasks.contract import Task


def as_planned(method: Method, task: Task, plan: Planned | None) -> tuple[Method, Task]:
    """A job's method and task with what was planned; the method's batch is the most.

    Raises:
        ConfigError: a plan is missing, or there is one that the job does not ask for, or it does not fit.
    """
    if task.to_be_planned != (plan is not None):
        raise ConfigError(
            "the job's network is to be planned, and there is no plan"
            if plan is None
            else "there is a plan, and the job's network is not to be planned"
        )
    if plan is None:
        return method, task
    return dataclasses.replace(method, batch_size=min(method.batch_size, plan.batch_size)), task.as_planned(plan)


def fingerprint_of(site_file: SiteFile, task: Task) -> Fingerprint:
    """What a hospital tells, if its policy allows it.

    Raises:
        ConfigError: the job's network is not to be planned.
        PolicyRefused: there are too few volumes for a statistic.
        MedPFLError: the volumes are not declared or cannot be read.
    """
    if not task.to_be_planned:
        raise ConfigError("the server asks what the volumes are like, and the job's network is not to be planned")
    found = site_file.dataset(task.dataset, Dataset).fingerprint()  # type: ignore[type-abstract]
    policy.check_statistic(site_file.policy, found.cases)
    return found


class Planning:
    """The server's side, before the first round.

    Args:
        roster: the hospitals' names; with others it is another run.
        home: of the job's state.
        record: is told what was planned, which hospital tells nothing, and which are oddly alike or different.

    Raises:
        MedPFLError: the plan of an unfinished run is there and cannot be read.
    """

    def __init__(self, job: Job, roster: Sequence[str], home: Path, record: Record, quorum: Quorum):
        said = [job.name, job.settings.of_run(), spec_of(job.method), spec_of(job.task), list(roster)]
        self._file = home / "plans" / f"{digest_of(said)}.json"
        self._roster, self._record, self._quorum = roster, record, quorum
        self._task, self._asked = job.task, PlanRequest(job=job.name)
        self.plan: Planned | None = None
        """What all are told; None: nothing is to be planned, or it has not been yet."""

    def messages(self) -> dict[str, Message[PlanRequest]]:
        """Empty where nothing is to be planned, or an unfinished run was."""
        if not self._task.to_be_planned:
            return {}
        if (kept := self._read()) is not None:
            self._record.event(0, "server", "the network is as it was planned for the unfinished run")
            self.plan = kept
            return {}
        return {site: Message(self._asked) for site in self._roster}

    def take(self, replies: Mapping[str, Message[Reply]]) -> None:
        """Plan the network for all hospitals that tell what their volumes are like.

        Raises:
            QuorumLost: too few did.
            ConfigError: there is no plan for them all.
        """

        def refuse(site: str, reason: str) -> None:
            self._quorum.refuse(site, 0, f"tells nothing for the plan: {reason}")

        ready = answers(self._asked, PlanReply, replies, None, no_tensors, refuse)
        usual = _usual([reply.header.fingerprint for reply in ready.values()])

        def check(site: str, reply: Message[PlanReply]) -> None:
            no_tensors(site, reply)
            self._check(reply.header.fingerprint, usual)

        fitting = answers(self._asked, PlanReply, ready, None, check, refuse)
        self._quorum.check(0, list(fitting), "told what their volumes are like")
        found = [reply.header.fingerprint for reply in fitting.values()]
        self.plan = self._task.plan(found)
        self._write(self.plan)
        self._record.event(0, "server", sentence(self.plan, sum(one.cases for one in found)))
        for notice in of_fingerprints({site: reply.header.fingerprint for site, reply in fitting.items()}):
            self._record.event(0, "server", notice)

    def _check(self, said: Fingerprint, usual: tuple[int, int] | None) -> None:
        """Raises RefusedUpdate: there is no plan for such volumes, or the others' have other channels or classes; one
        hospital cannot end the job for all."""
        if usual is not None and (said.channels, said.classes) != usual:
            raise RefusedUpdate(
                f"its volumes have {said.channels} channels and {said.classes} classes, and most hospitals' have "
                f"{usual[0]} and {usual[1]}"
            )
        try:
            self._task.plan([said])
        except ConfigError as error:
            raise RefusedUpdate(str(error)) from error

    def _read(self) -> Planned | None:
        """Of an unfinished run."""
        if not self._file.is_file():
            return None
        try:
            return Planned.model_validate_json(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MedPFLError(f"{self._file} is no plan of a network: remove it to start the run anew") from error

    def _write(self, plan: Planned) -> None:
        """Whole or not at all."""
        unfinished = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(plan.model_dump_json(), encoding="utf-8")
            unfinished.replace(self._file)
        except OSError as error:
            why = f"a file could not be written: {error.strerror}"
            raise MedPFLError(f"cannot write {self._file}: {error.strerror}", why) from error

    def forget(self) -> None:
        """The run is finished."""
        self._file.unlink(missing_ok=True)


def _usual(said: Sequence[Fingerprint]) -> tuple[int, int] | None:
    """The channels and classes that more hospitals have than any others; None: as many have others."""
    counts = Counter((one.channels, one.classes) for one in said).most_common(2)
    return counts[0][0] if counts and (len(counts) == 1 or counts[0][1] > counts[1][1]) else None


def sentence(plan: Planned, cases: int) -> str:
    """For the record."""
    size, spacing = "x".join(map(str, plan.size)), " x ".join(f"{length:g}" for length in plan.spacing)
    return (
        f"the network was planned from {cases} training volumes: patches of {size} voxels of {spacing} mm, "
        f"{len(plan.kernels)} levels, a batch of at most {plan.batch_size}"
    )
