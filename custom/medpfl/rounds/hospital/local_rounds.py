# SPDX-License-Identifier: Apache-2.0
"""A hospital's part of the rounds, once it is ready: statistics, training, further exchanges, validation."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from medpfl.core.devices import spare_core
from medpfl.core.errors import NotInRound, ProtocolError
from medpfl.core.seeding import seed_torch
from medpfl.core.tied import own_state
from medpfl.core.unkept import Unkept
from medpfl.data.policy import Policy
from medpfl.data.resident import Resident, bytes_shown
from medpfl.data.samples import SiteData
from medpfl.deployed.rebuilt import check_rebuilt
from medpfl.methods.contract import Build, Hospital, Method, Site, Span
from medpfl.methods.precision import states_of
from medpfl.methods.presented import Presented
from medpfl.models import compiling
from medpfl.results.line import MetricLine
from medpfl.results.schema import number
from medpfl.rounds.held_alike import Common
from medpfl.rounds.hospital import policy
from medpfl.rounds.hospital.mixed import drop_mixed, keep_mixed, small_mixed
from medpfl.rounds.hospital.networks import Networks
from medpfl.rounds.hospital.private import Basis, cut_of, held_private, save_private, save_refined
from medpfl.rounds.hospital.run_state import RunState
from medpfl.rounds.hospital.scoring import Scoring
from medpfl.rounds.messages import Message, Slots, copy_out, gather
from medpfl.rounds.privacy import BEFORE, Guard, Noise
from medpfl.rounds.protocol.replies import RefineReply, StatisticsReply, TrainReply, ValidateReply
from medpfl.rounds.protocol.requests import OfRun, RefineRequest, StatisticsRequest, TrainRequest, ValidateRequest
from medpfl.rounds.refining import take_shown
from medpfl.tasks.contract import Task


@dataclass
class Ready:
    """What a hospital has got ready for a job.

    Attributes:
        name: the hospital's.
        home: its folder of the job.
        methods: the job's, then the references.
        common: what all hospitals hold alike.
        served: slot that the server mixes to whether it travels.
        roster: the hospitals' names; ``seed``: the job's.
        guard: what leaves goes through it.
        stopped: whether the job was aborted.
        config: digest of the job's configuration.
        code: of what the site file alone names of other packages: a kind of dataset, a network.
        declared: see ``Basis``.
        resident: bytes of data that may stay on the device.
        networks: of all methods.
    """

    name: str
    home: Path
    methods: Sequence[Method]
    task: Task
    data: SiteData
    common: Common
    served: dict[str, bool]
    roster: tuple[str, ...]
    seed: int
    device: torch.device
    policy: Policy
    guard: Guard
    stopped: Callable[[], bool]
    config: str
    code: Mapping[str, str]
    declared: str
    resident: int = 0
    networks: Networks = field(init=False)

    @property
    def method(self) -> Method:
        """The job's."""
        return self.methods[0]

    @property
    def models(self) -> nn.ModuleDict:
        """All networks, by their names."""
        return self.networks.models

    @cached_property
    def cut(self) -> str:
        """See ``cut_of``."""
        return cut_of(self.data, self.task.spec.target, self.code)

    @property
    def basis(self) -> Basis:
        """With what it goes on with a run, or begins one."""
        return Basis(self.cut, self.declared, self.config)

    def build(self) -> None:
        """All networks with the job's initial weights."""
        start = self.common.start(self.method.start)
        build = Build(self.task, self.data, self.roster, self.seed, self.name, self.common.public, start)
        with policy.building(self.policy):
            self.networks = Networks(self.methods, build, self.served, self.device)
        policy.check_networks(self.policy, own_state(self.models))
        check_rebuilt(self.method, self.networks.of(self.method), self.task, self.data, len(self.roster))
        if compiling.wanted():
            for name, network in self.models.items():
                compiling.compile_in_place(network, name)


class LocalRounds:
    """Answers what is asked of the hospital in the rounds.

    Args:
        total: how many rounds the job has.

    Attributes:
        kept: what methods keep of the data in this process.
        presented: the round's augmented batches.
        resident: what of the data lies on the device.
    """

    def __init__(self, ready: Ready, run: RunState, total: int):
        self.ready, self.run, self.total = ready, run, total
        self.kept: dict[str, object] = {}
        self.presented = Presented(ahead=spare_core(ready.device))
        self._unkept: Unkept | None = None
        """What the networks hold outside their state; None: before the first training here."""
        self._saved: int | None = None
        """The round after which the networks' private entries were saved, as long as they are still those."""
        self._shown: dict[int, dict[str, list[dict[str, Tensor]]]] = {}
        """The round to what its first exchange within it showed of all hospitals, as long as it is under way."""
        self.resident = self.holding(ready.resident)

    def holding(self, most: int) -> Resident:
        """What keeps so many bytes of the data on the device: training data first, then what is evaluated."""
        here, method, splits = self.ready, self.ready.method, self.ready.data.splits
        count = len(splits["train"])
        if not here.task.shows_as_they_are:  # the batches of a round
            count = method.steps * method.batch_size if method.steps else method.epochs * count
        others = [samples for split, samples in splits.items() if split != "train"]
        return Resident(here.device, most, bytes_shown(splits["train"], count), others)

    def forget(self) -> None:
        """After a failed task: give back what lies on the device, for it may have been too much. The networks are to be
        built anew, for which there may be no room beside the old ones."""
        self.resident = Resident(self.ready.device)
        self.presented = Presented(ahead=spare_core(self.ready.device))
        self.kept.clear()
        self._shown.clear()
        self._saved = self._unkept = None
        self.ready.models.to("meta")

    def statistics(self, header: StatisticsRequest) -> Message[StatisticsReply]:
        """What the server's components want to know of the data here before the round."""
        here = self.ready
        here.guard.refuse_statistics(header.names)
        notes = self.enter(header)
        site = self.site(here.method, header.round)
        policy.check_statistic(here.policy, len(here.data.splits["train"]))
        given = {
            name: {key: copy_out(tensor) for key, tensor in here.method.statistics(name, site).items()}
            for name in header.names
        }
        return Message(StatisticsReply(notes=tuple(notes)), given)

    def train(self, header: TrainRequest, slots: Slots, own: bool = False) -> Message[TrainReply]:
        """Validate the mixed models, and train a round from them.

        Args:
            own: nobody else needs the tensors, and what is sent may lie in them: a model less in memory.
        """
        here, networks, current = self.ready, self.ready.networks, header.round
        started = time.monotonic()
        here.guard.begin()
        self._shown.clear()
        notes = self.enter(header)
        networks.take(slots)
        metrics = self._look_at_mixed(current - 1, header, slots) if current > 1 else []
        self._saved = None
        self._unkept = self._unkept or Unkept(here.models)
        losses = {}
        instead: Slots = {}
        for method in here.methods:
            # Dropout and the like draw from the global generator: seeded for each method, so that switching the
            # references on or off changes nothing.
            seed_torch(here.seed, here.name, current, type(method).__name__)
            for name in networks.of(method) if method.optimizer_state == "reset" else ():
                self.run.optimizers.pop(name, None)
            site = self.site(method, current, noise=here.guard.noise(method, header, networks.of(method)))
            method.local_round(site)
            networks.check_held(method)
            policy.check_trained(here.policy, site)
            told = policy.may_tell_loss(here.policy, site)
            losses[next(iter(method.deploys))] = number(float(site.last_loss)) if told else None
            instead.update(networks.sent_instead(method, site.outbox))
        self.resident.forget_round()
        self._unkept.check(here.models)
        here.guard.check_made(networks, slots, instead)
        state = self._trained()
        into = slots if own and not here.guard.compares else None
        sent = here.guard.release({**networks.gather(state, into), **instead}, slots, header)
        self._keep(current, header, state)
        self.run.trained = current
        seconds = round(time.monotonic() - started, 3)
        reply = TrainReply(round=current, metrics=tuple(metrics), loss=losses, notes=tuple(notes), seconds=seconds)
        return Message(here.guard.told(reply), sent)

    def _trained(self) -> dict[str, Tensor]:
        """The networks' state after training, whose gradients nobody needs any more."""
        for parameter in self.ready.models.parameters():
            parameter.grad = None
        return self.ready.networks.state()

    def _keep(self, current: int, header: TrainRequest, state: Mapping[str, Tensor]) -> None:
        """One file that is waited for until it is on the disk."""
        files, mixed = self.run.files, small_mixed(self.run.files, current - 1)
        best = {best.round for best in header.best.values()}
        private = {key: state[key] for key in self.ready.networks.private}
        optimizers, scalers = self.run.optimizers, self.run.scalers
        save_private(files, current, self.ready.basis, private, optimizers, scalers, mixed, best, header.begun)
        self._saved = current
        if mixed:
            drop_mixed(files, current - 1)

    def refine(self, header: RefineRequest, slots: Slots) -> Message[RefineReply]:
        """One further exchange of some slots within a round that this hospital has trained in.

        Raises:
            NotInRound: it has not, or its networks are no longer as training left them.
            ProtocolError: the method exchanges no such slot again: what is asked for here leaves, and was looked at
                only where the job began.
        """
        here, networks = self.ready, self.ready.networks
        if self.run.trained != header.round:
            raise NotInRound(
                f"{here.name} is asked for exchange {header.step} of round {header.round}, of which it holds nothing "
                "now: it did not train in it, failed in it or was started again; it can take part in the next round"
            )
        own = {slot: state for slot, state in slots.items() if slot in networks.slots}
        for slot in own:
            if slot not in {*here.method.refined, *here.method.delivered}.intersection(networks.travelling):
                kind = type(here.method).__name__
                raise ProtocolError(f"{kind} exchanges no slot '{slot}' within a round; {here.name} does not send it")
        here.guard.begin()
        networks.take(own, list(own))
        current, step = header.round, header.step
        seed_torch(here.seed, here.name, current, type(here.method).__name__, step)
        noise = here.guard.noise(here.method, header, networks.of(here.method), step)
        site = self.site(here.method, current, noise=noise)
        self._saved, before, scales = None, self._private(), states_of(self.run.scalers)
        if current not in self._shown:
            self._shown = {current: take_shown(slots, here.roster)}
        site.shown = self._shown[current]
        here.method.refine(site, step)
        networks.check_held(here.method)
        policy.check_trained(here.policy, site)
        private = self._private()
        sent = networks.sent_instead(here.method, site.outbox)
        answered = [slot for slot in own if slot in here.method.refined]
        here.guard.check_made(networks, {slot: own[slot] for slot in answered}, sent)
        sent = {**gather(self._trained(), networks.slots, answered), **sent}
        sent = here.guard.release(sent, own, header, step)
        moved = any(not torch.equal(tensor, before[key]) for key, tensor in private.items())  # BatchNorm's, say
        if moved or states_of(self.run.scalers) != scales:
            save_refined(self.run.files, current, private, self.run.scalers)
        return Message(RefineReply(round=current, step=step), sent)

    def _private(self) -> dict[str, Tensor]:
        """Copies of the private entries that further exchanges may change: those of the job's method."""
        networks = self.ready.networks
        mine = [key for key in networks.private if networks.owner[key.partition(".")[0]] is self.ready.method]
        state = networks.state() if mine else {}
        return {key: copy_out(state[key]) for key in mine}

    def validate(self, header: ValidateRequest, slots: Slots) -> Message[ValidateReply]:
        """After the last round: look at its mixed models too, so that the last round can be the best."""
        notes = self.enter(header)
        self._shown.clear()
        self.run.looked = True
        self.ready.networks.take(slots)
        metrics = self._look_at_mixed(header.round, header, slots)
        return Message(ValidateReply(metrics=tuple(metrics), notes=tuple(notes)))

    def _look_at_mixed(self, round_number: int, header: OfRun, slots: Slots) -> list[MetricLine]:
        """Validate the models as a round's mixing left them, of these ``slots``, and keep them until another round is
        better."""
        here = self.ready
        making = [method for method in here.methods if type(method).after_mixing is not Method.after_mixing]
        if making:
            with torch.random.fork_rng(devices=[]):
                for method in making:
                    seed_torch(here.seed, here.name, round_number, type(method).__name__, "mixed")
                    # what is trained here goes into what the round sends
                    noise = here.guard.noise(method, header, here.networks.of(method), BEFORE)
                    site = self.site(method, round_number, noise=noise)
                    method.after_mixing(site)
                    here.networks.check_held(method)
                    if isinstance(header, TrainRequest):
                        policy.check_trained(here.policy, site)
        metrics = self.scoring.lines(here.methods, round_number)
        received: dict[str, Tensor] = {}
        if not making:  # the networks are what was kept after training, and in the slots what the server sent
            received = held_private(self.run.files, round_number) if self._saved == round_number else {}
            received.update((key, tensor) for state in slots.values() for key, tensor in state.items())
        best = {best.round for best in header.best.values()}
        keep_mixed(self.run.files, round_number, here.networks.state(), best, received)
        return metrics

    def enter(self, header: OfRun) -> list[str]:
        """See ``RunState.enter``."""
        return self.run.enter(header, self.ready.home, self.ready.networks, self.ready.basis)

    def site(self, method: Method, round_number: int, span: Span | None = None, noise: Noise = None) -> Site:
        """The hospital as a method sees it in a round.

        Args:
            span: the rounds over which the learning rate's schedule runs; None: all of the job's.
        """
        here = self.ready
        hospital = Hospital(
            task=here.task,
            data=here.data,
            models=here.models,
            device=here.device,
            roster=here.roster,
            name=here.name,
            seed=here.seed,
            optimizers=self.run.optimizers,
            scalers=self.run.scalers,
            stopped=here.stopped,
            checkpoints=here.common.checkpoints,
            public=here.common.public,
            kept=self.kept,
            presented=self.presented,
            resident=self.resident,
            noise=noise,
            least_count=here.policy.least_count,
        )
        return Site(hospital, method, round_number, span or Span(1, self.total))

    @property
    def scoring(self) -> Scoring:
        """The models as they are now, on the hospital's own splits."""
        here = self.ready
        return Scoring(here.models, here.task, here.data, here.device, here.roster.index(here.name))
