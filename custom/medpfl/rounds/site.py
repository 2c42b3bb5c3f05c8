# SPDX-License-Identifier: Apache-2.0
"""A hospital's side of a job, without a transport: build, train, validate, test, keep state."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from medpfl import store
from medpfl.component import spec_of
from medpfl.core.devices import memory_errors, training_device
from medpfl.core.errors import ConfigError, ProtocolError
from medpfl.core.seeding import seed_torch
from medpfl.core.tied import own_state
from medpfl.data.samples import SiteData
from medpfl.data.site_file import SiteFile
from medpfl.methods.base import Build, Hospital, Method, Site, Span
from medpfl.methods.presented import Presented
from medpfl.methods.references import riding_along
from medpfl.results.line import MetricLine
from medpfl.results.schema import number
from medpfl.rounds import policy
from medpfl.rounds.announcing import fine_tuned_name, plan_of, rebuild_of, versions
from medpfl.rounds.choosing import Holding, local_first
from medpfl.rounds.evaluation import GIVEN, evaluate_given
from medpfl.rounds.held_alike import read_common
from medpfl.rounds.lock import StateLock
from medpfl.rounds.messages import Message, Slots, copy_out, digest_of, gather, load, plain_name
from medpfl.rounds.mixed import MIXED, keep_mixed, load_mixed
from medpfl.rounds.networks import Networks
from medpfl.rounds.planning import as_planned, fingerprint_of
from medpfl.rounds.privacy import Guard, Noise, refuse_plan
from medpfl.rounds.private import PRIVATE, restore_private, save_private
from medpfl.rounds.protocol import replies as heard
from medpfl.rounds.protocol import requests as ask
from medpfl.rounds.refining import take_shown
from medpfl.rounds.scoring import Scoring
from medpfl.rounds.sealing import Seal, seal_of
from medpfl.tasks.base import Task

Choice = Literal["best", "last"]


class SiteRunner:
    """Answers the server's messages for one hospital.

    Args:
        name: the hospital's name in the federation.
        site_file: gives the declared data; called once, when the job starts.
        root: the hospital's folder for MedPFL, outside FLARE's run folder; <root>/<job> keeps state and models.
        stopped: whether the job was aborted; asked before every batch.
        filters: full class names of the FLARE filters through which everything goes that leaves; the hospital's policy
            may ask for some.
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
    ):
        self.name, self.root = name, root
        self.method, self.task = method.at(name), task.at(name)
        self._given = method, task
        self._site_file, self._stopped, self._filters = site_file, stopped, filters
        self.device = training_device()
        self._log = logging.getLogger(f"{__name__}.{name}")
        self.data: SiteData
        self.networks: Networks
        self._run: str | None = None
        self._lock = StateLock()
        self._ready = False
        self._seal: Seal | None = None

    @property
    def models(self) -> nn.ModuleDict:
        """All networks, by their names."""
        return self.networks.models

    def handle(self, message: Message[ask.Request]) -> Message[heard.Reply]:
        """Answer one message.

        Raises:
            ProtocolError: it is of a run, and comes before the first.
            CodecError: the job encrypts, and it cannot be decrypted, or the answer not encrypted.
            OutOfMemory: the machine or its GPU has too little memory for it.
        """
        header = message.header
        if isinstance(header, ask.OfRun) and not self._ready:
            raise ProtocolError(f"{self.name} is asked for a part of a run before it was asked to get ready")
        if isinstance(header, ask.OfRun):
            policy.check_round(self.policy, header)
            self._rounds = header.rounds
        with memory_errors(f"take a smaller batch_size (now {self.method.batch_size}) or smaller images or patches"):
            reply = self._answer(self._seal.open(message) if self._seal else message)
        return self._seal.close(reply) if self._seal else reply

    def _answer(self, message: Message[ask.Request]) -> Message[heard.Reply]:
        header, slots = message.header, message.slots
        match header:
            case ask.PlanRequest():
                site_file = self._site_file()
                refuse_plan(site_file.policy, self.method)
                policy.check_classes(site_file.policy, [self.method], self.task, self._filters)
                return Message(heard.PlanReply(fingerprint=fingerprint_of(site_file, self.task)))
            case ask.InitRequest():
                return self._init(header)
            case ask.StatisticsRequest():
                return self._statistics(header)
            case ask.TrainRequest():
                return self._train(header, slots)
            case ask.RefineRequest():
                return self._refine(header, slots)
            case ask.ValidateRequest():
                return self._validate(header, slots)
            case ask.FinishRequest():
                return self._finish(header)
            case ask.EvaluateRequest():
                return self._evaluate_given(message.of(ask.EvaluateRequest))

    def _evaluate_given(self, message: Message[ask.EvaluateRequest]) -> Message[heard.EvaluateReply]:
        home = self.root / plain_name(message.header.job)
        site_file = self._site_file()
        policy.check_threads(site_file.policy, message.header.threads)
        policy.check_classes(site_file.policy, [self.method], self.task, self._filters)
        policy.check_networks(site_file.policy, message.slots.get(GIVEN, {}))
        return evaluate_given(message, self.name, self.method, self.task, site_file, home, self.device)

    # -- init ---------------------------------------------------------------------------------------------------------

    def _init(self, header: ask.InitRequest) -> Message[heard.InitReply]:
        site_file = self._site_file()
        self.policy = site_file.policy
        method, task = as_planned(*self._given, header.planned)
        self.method, self.task = method.at(self.name), task.at(self.name)
        self._config = [spec_of(method), spec_of(task)]
        self.methods = [self.method, *riding_along(header.slots, self.method)]
        policy.check_start(self.policy, header)
        policy.check_classes(self.policy, self.methods, self.task, self._filters)
        torch.set_num_threads(header.threads)
        self.home = self.root / plain_name(header.job)
        self._guard = Guard(self.home, self.name, self.policy, self.methods, header.rounds, header.gradients)
        self.roster = header.roster
        self.seed, self.gradients = header.seed, frozenset(header.gradients)
        self._rounds = header.rounds
        if self.name not in self.roster:
            raise ConfigError(f"{self.name} is not one of this job's hospitals: {', '.join(self.roster)}")
        self._kept: dict[str, object] = {}
        self._presented = Presented()
        self.task = self.task.chosen(site_file)
        self.data = self.task.load(site_file)
        self.task = self.task.informed(self.data)
        policy.check_data(self.policy, self.data, self.methods)
        self.common = read_common(self.method, self.task, site_file, self.data)
        common = self.common.marks()
        self._served = header.slots
        self._build()
        self._guard.check(self.networks, self.task, self.data)
        start = self.networks.gather()
        self._seal = seal_of(header, site_file, self.name, start, self.networks.untrained(), self.roster)
        self._ready = True
        self._log.info(self.networks.describe())
        reply = heard.InitReply(
            sizes=heard.Sizes(**{split: len(samples) for split, samples in self.data.splits.items()}),
            config=digest_of([*self._config, common]),
            common=common,
            buffers=tuple(self.networks.untrained()),
            recipe=rebuild_of(self._config[0], self._config[1], self.data),
            personalised=next(iter(self.method.deploys)),
            score=self.task.score,
            measures=self.task.measures,
            classes=tuple(self.data.class_names),
            versions=versions(),
            plan=plan_of(self.method, self.methods, header.rounds),
            encryption=self._seal.fingerprint if self._seal else None,
        )
        return Message(reply, start)

    def _build(self) -> None:
        """All networks with the job's initial weights."""
        start = self.common.start(self.method.start)
        build = Build(self.task, self.data, self.roster, self.seed, self.name, self.common.public, start)
        with policy.building(self.policy):
            self.networks = Networks(self.methods, build, self._served, self.device)
        policy.check_networks(self.policy, own_state(self.models))

    def close(self) -> None:
        """Let another job work in the run's state folder."""
        self._lock.release()

    def recover(self) -> None:
        """After a failed task: forget what it half did; the next task starts from the state kept on disk."""
        self._run = None
        if self._ready:
            self._build()

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _train(self, header: ask.TrainRequest, slots: Slots) -> Message[heard.TrainReply]:
        started = time.monotonic()
        current = header.round
        self._guard.begin()
        notes = self._enter_run(header)
        load(self.models, slots)
        metrics = self._look_at_mixed(current - 1, header) if current > 1 else []
        losses = {}
        instead: Slots = {}
        for method in self.methods:
            # Dropout and the like draw from the global generator: seeded for each method, so that switching the
            # references on or off changes nothing.
            seed_torch(self.seed, self.name, current, type(method).__name__)
            for name in self.networks.of(method) if method.optimizer_state == "reset" else ():
                self._optimizers.pop(name, None)
            site = self._site(method, current, noise=self._guard.noise(method, header))
            method.local_round(site)
            policy.check_trained(self.policy, site)
            losses[next(iter(method.deploys))] = number(site.last_loss)
            instead.update(self.networks.sent_instead(site.outbox))
        sent = self._guard.release({**self.networks.gather(), **instead}, slots, header)
        save_private(self._state, current, self.models, self.networks.private(), self._optimizers)
        seconds = round(time.monotonic() - started, 3)
        reply = heard.TrainReply(
            round=current, metrics=tuple(metrics), loss=losses, notes=tuple(notes), seconds=seconds
        )
        return Message(self._guard.told(reply), sent)

    def _statistics(self, header: ask.StatisticsRequest) -> Message[heard.StatisticsReply]:
        """What the server's components want to know of the data here before the round."""
        self._guard.refuse_statistics(header.names)
        notes = self._enter_run(header)
        site = self._site(self.method, header.round)
        policy.check_statistic(self.policy, len(self.data.splits["train"]))
        given = {
            name: {key: copy_out(tensor) for key, tensor in self.method.statistics(name, site).items()}
            for name in header.names
        }
        return Message(heard.StatisticsReply(notes=tuple(notes)), given)

    def _refine(self, header: ask.RefineRequest, slots: Slots) -> Message[heard.RefineReply]:
        """One further exchange of some slots within a round that this hospital has trained in."""
        self._guard.begin()
        own = {slot: state for slot, state in slots.items() if slot in self.networks.slots}
        load(self.models, own)
        current, step = header.round, header.step
        seed_torch(self.seed, self.name, current, type(self.method).__name__, step)
        site = self._site(self.method, current, noise=self._guard.noise(self.method, header, step))
        site.shown = site.keep(f"shown in round {current}", lambda: take_shown(slots, self.roster))
        self.method.refine(site, step)
        policy.check_trained(self.policy, site)
        sent = self.networks.sent_instead(site.outbox)
        sent = {**gather(self.models, self.networks.slots, own), **sent}
        return Message(heard.RefineReply(round=current, step=step), self._guard.release(sent, own, header, step))

    def _validate(self, header: ask.ValidateRequest, slots: Slots) -> Message[heard.ValidateReply]:
        """After the last round: look at its mixed models too, so that the last round can be the best."""
        notes = self._enter_run(header)
        load(self.models, slots)
        metrics = self._look_at_mixed(header.round, header)
        return Message(heard.ValidateReply(metrics=tuple(metrics), notes=tuple(notes)))

    def _site(self, method: Method, round_number: int, span: Span | None = None, noise: Noise = None) -> Site:
        hospital = Hospital(
            task=self.task,
            data=self.data,
            models=self.models,
            device=self.device,
            roster=self.roster,
            name=self.name,
            seed=self.seed,
            optimizers=self._optimizers,
            stopped=self._stopped,
            checkpoints=self.common.checkpoints,
            public=self.common.public,
            kept=self._kept,
            presented=self._presented,
            noise=noise,
            least_count=self.policy.least_count,
        )
        return Site(hospital, method, round_number, span or Span(1, self._rounds))

    def _look_at_mixed(self, round_number: int, header: ask.OfRun) -> list[MetricLine]:
        """Validate the models as they came out of a round's mixing and keep them until a better round is known."""
        with torch.random.fork_rng(devices=[]):
            for method in self.methods:
                seed_torch(self.seed, self.name, round_number, type(method).__name__, "mixed")
                method.after_mixing(self._site(method, round_number))
        metrics = self._scoring.lines(self.methods, round_number)
        keep_mixed(self._state, round_number, self.models, {best.round for best in header.best.values()})
        return metrics

    @property
    def _scoring(self) -> Scoring:
        return Scoring(self.models, self.task, self.data, self.device, self.roster.index(self.name))

    # -- state --------------------------------------------------------------------------------------------------------

    def _enter_run(self, header: ask.OfRun) -> list[str]:
        """On this process's first task of a run: start afresh in round 1, else take up what was kept on disk."""
        if self._run == header.run:
            return []
        self._state = self.home / "state" / plain_name(header.run)
        self._lock.take(self._state, f"at {self.name}", self._stopped)
        self._run = header.run
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        done = header.round - isinstance(header, ask.StatisticsRequest | ask.TrainRequest)
        if done == 0:
            for kind in (PRIVATE, MIXED):
                store.discard(self._state, kind)
            return []
        kept, damaged = store.newest(self._state, PRIVATE, last=done)
        notes = [f"the state kept here after round {lost} is damaged and not used" for lost in damaged]
        if kept is None:
            return [*notes, f"no state of this run is kept here; the private part starts anew in round {done + 1}"]
        self._optimizers = restore_private(kept, self.models, self.networks.owner)
        return [*notes, f"resumed from the state after round {kept.number}"]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, header: ask.FinishRequest) -> Message[heard.FinishReply]:
        """Test best and last models once, fine-tune a common one, keep the models at the hospital."""
        notes = self._enter_run(header)
        last = header.round
        lines: list[MetricLine] = []
        self._holding = Holding(
            self.task, self.data, self.device, self.home / "models", self.home.name, self.name, self.seed,
            self.methods, len(self.roster), self.policy.least_scored, self._guard.spent,
        )  # fmt: skip
        for method in local_first(self.methods):
            for name in method.deploys:
                best = header.best[name].round if name in header.best else last
                choices: tuple[tuple[Choice, int], ...] = (("best", best), ("last", last))
                for choice, round_number in choices:
                    note = load_mixed(self._state, round_number, self.models)
                    if note:
                        notes.append(f"{name}, {choice} round {round_number}: {note}")
                        continue
                    lines.append(self._test(method, name, choice, round_number))
        for method in self.methods:
            if method.fine_tuned is not None and header.finetune:
                best = header.best[method.fine_tuned].round if method.fine_tuned in header.best else last
                note = load_mixed(self._state, best, self.models)
                if note:
                    notes.append(f"{fine_tuned_name(method.fine_tuned)}: {note}")
                else:
                    lines.append(self._fine_tune(method, method.fine_tuned, best, last, header.finetune))
        order = plan_of(self.method, self.methods, header.rounds).tested
        lines.sort(key=lambda line: order.index(line.model))
        chosen, spent = self._holding.choose(last), self._guard.spent
        return Message(heard.FinishReply(metrics=tuple(lines), notes=tuple(notes), chosen=chosen, privacy=spent))

    def _test(
        self, method: Method, name: str, choice: Choice, round_number: int, deployed: str | None = None
    ) -> MetricLine:
        networks = self.networks.of(method)
        return self._holding.test(method, name, self.models, networks, choice, round_number, deployed or name)

    def _fine_tune(self, method: Method, name: str, best: int, last: int, rounds: int) -> MetricLine:
        """Local rounds from the best common model called ``name``, the number of them chosen on validation."""
        self._optimizers = {}
        model, deployed = method.deploys[name], fine_tuned_name(name)
        measure = self.task.measure
        chosen, best_score = None, None
        for extra in range(1, rounds + 1):
            seed_torch(self.seed, self.name, last + extra, deployed)
            self._site(method, last + extra, Span(last + 1, rounds)).fit(model)
            evaluation = self._scoring.validate(method, name)
            score = number(evaluation.metrics[self.task.score]) if evaluation else None
            # Where nothing can be validated, the last counts; an undefined score never replaces a known one.
            if best_score is None or (score is not None and measure.better(score, best_score)):
                best_score = score
                chosen = {key: value.clone() for key, value in self.models[model].state_dict().items()}
        assert chosen is not None  # finetune >= 1
        self.models[model].load_state_dict(chosen)
        return self._test(method, name, "best", best, deployed=deployed)
