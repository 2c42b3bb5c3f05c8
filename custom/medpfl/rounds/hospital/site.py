# SPDX-License-Identifier: Apache-2.0
"""A hospital's side of a job, without a transport: gets ready for it, and hands every message to what answers it.

The rounds are in ``rounds.hospital.local_rounds``, the end of the job in ``rounds.hospital.finishing``.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from medpfl.component import class_name, class_paths, spec_of
from medpfl.core.devices import bytes_for_data, current, memory_errors, training_device
from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError, OutOfMemory, ProtocolError
from medpfl.core.repeatable import repeatable
from medpfl.core.sources import code_here
from medpfl.data.resident import serving
from medpfl.data.samples import SiteData
from medpfl.data.schema import digest_of_declared
from medpfl.data.site_file import SiteFile
from medpfl.data.target import Target
from medpfl.methods.contract import Method
from medpfl.methods.references import riding_along
from medpfl.models.norms import single_sample_errors
from medpfl.rounds.announcing import plan_of, rebuild_of, versions
from medpfl.rounds.evaluation import GIVEN, evaluate_given
from medpfl.rounds.held_alike import read_common
from medpfl.rounds.hospital import policy, withholding
from medpfl.rounds.hospital.finishing import finish
from medpfl.rounds.hospital.local_rounds import LocalRounds, Ready
from medpfl.rounds.hospital.networks import Networks
from medpfl.rounds.hospital.run_files import RunFiles
from medpfl.rounds.hospital.run_state import RunState
from medpfl.rounds.messages import Message, plain_name
from medpfl.rounds.planning import as_planned, fingerprint_of
from medpfl.rounds.privacy import Guard, refuse_plan
from medpfl.rounds.protocol.replies import EvaluateReply, InitReply, PlanReply, Reply, Sizes, StatisticsReply
from medpfl.rounds.protocol.requests import (
    EvaluateRequest,
    FinishRequest,
    InitRequest,
    OfRun,
    PlanRequest,
    RefineRequest,
    Request,
    StatisticsRequest,
    TrainRequest,
    ValidateRequest,
)
from medpfl.rounds.sealing import Seal, seal_of
from medpfl.tasks.contract import Task


class SiteRunner:
    """Answers the server's messages for one hospital.

    Args:
        name: the hospital's name in the federation.
        site_file: gives the declared data; called once, when the job starts.
        root: the hospital's folder for MedPFL, outside FLARE's run folder; <root>/<job> keeps state and models.
        stopped: whether the job was aborted; asked before every batch.
        filters: full class names of the FLARE filters through which everything goes that leaves; the hospital's policy
            may ask for some.
        turn: its number among the hospitals of this process, from 0, which take the machine's GPUs in turn.
        of: how many these are.
        files: what it keeps of a run, given the run's folder.
    """

    def __init__(
        self,
        name: str,
        method: Method,
        task: Task,
        site_file: Callable[[], SiteFile],
        root: Path,
        stopped: Callable[[], bool] = lambda: False,
        filters: Sequence[str] = (),
        turn: int = 0,
        of: int = 1,
        files: Callable[[Path], RunFiles] = RunFiles,
    ):
        self.name, self.root = name, root
        self.method, self.task = method.at(name), task.at(name)
        self._given = method, task
        self._site_file, self._stopped, self._filters = site_file, stopped, filters
        self._turn, self._of = turn, of
        self.device = training_device(turn=turn)
        self._log = logging.getLogger(f"{__name__}.{name}")
        self.run = RunState(name, stopped, files)
        self.ready: Ready
        self.rounds: LocalRounds
        self._begun = self._spoilt = False
        self._seal: Seal | None = None

    @property
    def models(self) -> nn.ModuleDict:
        """All networks, by their names."""
        return self.ready.models

    @property
    def networks(self) -> Networks:
        """All networks, and the slots they make up."""
        return self.ready.networks

    @property
    def data(self) -> SiteData:
        """The hospital's."""
        return self.ready.data

    def handle(self, message: Message[Request]) -> Message[Reply]:
        """Answer one message.

        Raises:
            ProtocolError: it is of a run, and comes before the first.
            CodecError: the job encrypts, and it cannot be decrypted, or the answer not encrypted.
            OutOfMemory: the machine or its GPU has too little memory for it.
            ConfigError: BatchNorm is to train on a single value.
        """
        header = message.header
        if isinstance(header, OfRun) and not self._begun:
            raise ProtocolError(f"{self.name} is asked for a part of a run before it was asked to get ready")
        if isinstance(header, OfRun):
            policy.check_round(self.policy, header)
            self.rounds.total = header.rounds
            done = header.round - isinstance(header, StatisticsRequest | TrainRequest)
            looked = self.run.looked and not isinstance(header, FinishRequest)
            if looked or (self.run.trained is not None and done < self.run.trained):
                # Its answer was lost on the way and is made again, or the job ends with the round before: both go on
                # from the state before it. (A method may train or count on what was mixed, too: after the last round
                # that is in no account of noise, and a server that asks for one more must not have it in what leaves.)
                self.recover()
        hint = f"take a smaller batch_size (now {self.method.batch_size}) or smaller images or patches"
        resident = self.rounds.resident if self._begun else None
        errors = single_sample_errors(self.method.batch_size)
        with memory_errors(hint), errors, current(self.device), repeatable(self.device), serving(resident):
            if self._spoilt and isinstance(header, OfRun):
                self._rebuild()
            reply = self._answer(self._seal.open(message) if self._seal else message)
        statistics = reply.slots if isinstance(reply.header, StatisticsReply) else ()
        reply = withholding.without(self.policy, reply, statistics)
        return self._seal.close(reply) if self._seal else reply

    def _answer(self, message: Message[Request]) -> Message[Reply]:
        header, slots = message.header, message.slots
        match header:
            case PlanRequest():
                site_file = self._site_file()
                self.policy = site_file.policy
                refuse_plan(self.policy, self.method)
                policy.check_classes(self.policy, [self.method], self.task, self._filters)
                return Message(PlanReply(fingerprint=fingerprint_of(site_file, self.task)))
            case InitRequest():
                return self._init(header)
            case StatisticsRequest():
                return self.rounds.statistics(header)
            case TrainRequest():
                return self.rounds.train(header, slots, message.own)
            case RefineRequest():
                return self.rounds.refine(header, slots)
            case ValidateRequest():
                return self.rounds.validate(header, slots)
            case FinishRequest():
                return finish(header, self.rounds)
            case EvaluateRequest():
                return self._evaluate_given(message.of(EvaluateRequest))

    def _evaluate_given(self, message: Message[EvaluateRequest]) -> Message[EvaluateReply]:
        home = self.root / plain_name(message.header.job)
        site_file = self._site_file()
        self.policy = site_file.policy
        withholding.check_known(self.policy)
        policy.check_threads(self.policy, message.header.threads)
        policy.check_classes(self.policy, [self.method], self.task, self._filters)
        policy.check_networks(self.policy, message.slots.get(GIVEN, {}))
        self.device = training_device(site_file.gpu.device, self._turn)
        with current(self.device):
            return evaluate_given(message, self.name, self.method, self.task, site_file, home, self.device)

    def _init(self, header: InitRequest) -> Message[InitReply]:
        site_file = self._site_file()
        self.policy = site_file.policy
        method, task = as_planned(*self._given, header.planned)
        self.method, self.task = method.at(self.name), task.at(self.name)
        recipe = [spec_of(method), spec_of(task)]
        code = code_here(class_paths(recipe))  # a run does not go on with another method of the same name
        said = [*recipe, code] if code else recipe
        methods = [self.method, *riding_along(header.slots, self.method)]
        self.device = training_device(site_file.gpu.device, self._turn)
        policy.check_start(self.policy, header)
        withholding.check_job(self.policy, header)
        policy.check_classes(self.policy, methods, self.task, self._filters)
        torch.set_num_threads(header.threads)
        home = self.root / plain_name(header.job)
        guard = Guard(home, self.name, self.policy, methods, header.rounds, header.gradients)
        self.gradients = frozenset(header.gradients)
        if self.name not in header.roster:
            raise ConfigError(f"{self.name} is not one of this job's hospitals: {', '.join(header.roster)}")
        chosen = self.task.chosen(site_file)
        data = chosen.load(site_file)
        own = set(class_paths(spec_of(chosen))).difference(class_paths(recipe))
        own.add(class_name(type(site_file.datasets[chosen.dataset])))
        self.task = chosen.informed(data)
        policy.check_data(self.policy, data, methods)
        common = read_common(self.method, self.task, site_file, data.input_shape, data)
        public = max((len(inputs) for inputs in common.public.values()), default=0)
        for each in methods:
            policy.check_passes(self.policy, each, len(data.splits["train"]), public)
        marks = common.marks()
        ready = Ready(
            name=self.name,
            home=home,
            methods=methods,
            task=self.task,
            data=data,
            common=common,
            served=header.slots,
            roster=header.roster,
            seed=header.seed,
            device=self.device,
            policy=self.policy,
            guard=guard,
            stopped=self._stopped,
            config=digest_of([*said, marks]),
            code=code_here(own),
            declared=_declared(site_file, chosen, data),
            resident=bytes_for_data(self.device, site_file.gpu.cache_gb, self._of),
        )
        ready.build()
        guard.check(ready.networks, self.task, data)
        self.fixed = ready.networks.fixed()
        start = ready.networks.gather()
        self._seal = seal_of(header, site_file, self.name, start, ready.networks.untrained(), header.roster)
        sealed = [self._seal.fingerprint] if self._seal else []  # with another key nobody can read what the server kept
        ready.config = digest_of([*said, marks, *sealed])  # nor does what was encrypted go on in the clear
        self.run.forget()
        self.ready, self.rounds = ready, LocalRounds(ready, self.run, header.rounds)
        self._begun, self._spoilt = True, False
        self._log.info(ready.networks.describe())
        reply = InitReply(
            sizes=Sizes(**{split: len(samples) for split, samples in data.splits.items()}),
            config=ready.config,
            common=marks | (self._seal.mark() if self._seal else {}),
            buffers=(*ready.networks.untrained(), *self.fixed),
            recipe=rebuild_of(recipe[0], recipe[1], data),
            personalised=next(iter(self.method.deploys)),
            score=self.task.score,
            measures=self.task.measures,
            classes=tuple(data.class_names),
            versions=versions(),
            plan=plan_of(self.method, methods, header.rounds),
            encryption=next(iter(sealed), None),
            agreed=digest_of_declared(site_file, self.task.dataset) if header.agreed else None,
        )
        return Message(reply, start)

    @property
    def begun(self) -> bool:
        """Whether it has got ready for a job."""
        return self._begun

    def close(self) -> None:
        """Let another job work in the run's state folder."""
        self.run.close()

    def recover(self) -> None:
        """After a failed task: forget what it half did; the next task starts from the state kept on disk."""
        self.run.forget()
        if not self._begun:
            return
        self.rounds.forget()
        self._spoilt = True
        try:
            with memory_errors("the hospital tries again"), current(self.device):
                self._rebuild()
        except OutOfMemory as error:  # then the next task begins with it, and fails if there still is none
            self._log.warning("%s: its networks are not built anew yet: %s", self.name, error)

    def _rebuild(self) -> None:
        self.ready.build()
        self._spoilt = False


def _declared(site_file: SiteFile, task: Task, data: SiteData) -> str:
    """See ``Basis``; ``task`` has the network that the hospital trains."""
    masks = task.spec.target is Target.MASK
    coding = site_file.datasets[task.dataset].coding_of_masks() if masks else []
    return digest_of([list(data.input_shape), coding, spec_of(task)])
