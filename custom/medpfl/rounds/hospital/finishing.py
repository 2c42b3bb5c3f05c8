# SPDX-License-Identifier: Apache-2.0
"""The end of a job at a hospital: test best and last models once, fine-tune a common one, choose, keep the models."""

from typing import Literal

from medpfl.core.seeding import seed_torch
from medpfl.methods.contract import Method, Span
from medpfl.results.line import MetricLine
from medpfl.results.schema import number
from medpfl.rounds.announcing import fine_tuned_name, plan_of
from medpfl.rounds.hospital.choosing import Holding, local_first
from medpfl.rounds.hospital.local_rounds import LocalRounds
from medpfl.rounds.hospital.mixed import load_mixed
from medpfl.rounds.hospital.models_folder import alone, open_models
from medpfl.rounds.hospital.page import write_page
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import FinishReply
from medpfl.rounds.protocol.requests import FinishRequest

Choice = Literal["best", "last"]


def finish(header: FinishRequest, rounds: LocalRounds) -> Message[FinishReply]:
    """Answer the last request of a job.

    Args:
        rounds: of the hospital, whose models as they were mixed it kept.
    """
    here = rounds.ready
    with alone(here.home, here.name, here.stopped):
        return _Finishing(header, rounds).answer()


class _Finishing:
    def __init__(self, header: FinishRequest, rounds: LocalRounds):
        self._header, self._rounds, self._here = header, rounds, rounds.ready
        self._notes = rounds.enter(header)
        here = self._here
        self._models = open_models(here.home, f"{header.run} {here.cut} {here.declared}", header.begun)
        self._holding = Holding(
            here.task, here.data, here.device, self._models.folder, here.home.name, here.name, here.seed,
            here.methods, len(here.roster), here.policy.least_scored, here.guard.spent,
        )  # fmt: skip

    def answer(self) -> Message[FinishReply]:
        here, last = self._here, self._header.round
        lines = [*self._tested(), *self._fine_tuned()]
        order = plan_of(here.method, here.methods, self._header.rounds).tested
        lines.sort(key=lambda line: order.index(line.model))
        chosen, spent = self._holding.choose(last), here.guard.spent
        if any(line.choice == "best" for line in lines):  # none: what was kept of all best rounds is damaged
            write_page(self._models.folder)
        self._models.drop_replaced()
        # Fine-tuning has no noise: a round that a server asks for after it goes on from what was kept before.
        self._rounds.run.forget()
        self._rounds.run.looked = True
        return Message(FinishReply(metrics=tuple(lines), notes=tuple(self._notes), chosen=chosen, privacy=spent))

    def _tested(self) -> list[MetricLine]:
        """Every model of its best round and of the last one, on the test split."""
        lines = []
        for method in local_first(self._here.methods):
            for name in method.deploys:
                choices: tuple[tuple[Choice, int], ...] = (("best", self._best(name)), ("last", self._header.round))
                for choice, round_number in choices:
                    note = load_mixed(self._rounds.run.files, round_number, self._here.models)
                    if note:
                        self._notes.append(f"{name}, {choice} round {round_number}: {note}")
                        continue
                    lines.append(self._test(method, name, choice, round_number, name))
        return lines

    def _fine_tuned(self) -> list[MetricLine]:
        """The common models that are fine-tuned here, on the test split."""
        lines = []
        for method in self._here.methods:
            if method.fine_tuned is not None and self._header.finetune:
                best = self._best(method.fine_tuned)
                note = load_mixed(self._rounds.run.files, best, self._here.models)
                if note:
                    self._notes.append(f"{fine_tuned_name(method.fine_tuned)}: {note}")
                else:
                    lines.append(self._fine_tune(method, method.fine_tuned, best))
        return lines

    def _fine_tune(self, method: Method, name: str, best: int) -> MetricLine:
        """Local rounds from the best common model called ``name``, the number of them chosen on validation."""
        here, last, extra_rounds = self._here, self._header.round, self._header.finetune
        model, deployed = method.deploys[name], fine_tuned_name(name)
        measure = here.task.measure
        chosen, best_score = None, None
        for extra in range(1, extra_rounds + 1):
            if extra == 1 or method.optimizer_state == "reset":
                self._rounds.run.optimizers = {}
            seed_torch(here.seed, here.name, last + extra, deployed)
            self._rounds.site(method, last + extra, Span(last + 1, extra_rounds)).fit(model)
            evaluation = self._rounds.scoring.validate(method, name)
            score = number(evaluation.metrics[here.task.score]) if evaluation else None
            # Where nothing can be validated, the last counts; an undefined score never replaces a known one.
            if best_score is None or (score is not None and measure.better(score, best_score)):
                best_score = score
                chosen = {key: value.clone() for key, value in here.models[model].state_dict().items()}
        assert chosen is not None  # finetune >= 1
        here.models[model].load_state_dict(chosen)
        return self._test(method, name, "best", best, deployed)

    def _best(self, name: str) -> int:
        """The round of which a model is taken as the best: the last, where no best is known."""
        return self._header.best[name].round if name in self._header.best else self._header.round

    def _test(self, method: Method, name: str, choice: Choice, round_number: int, deployed: str) -> MetricLine:
        here = self._here
        networks = here.networks.of(method)
        return self._holding.test(method, name, here.models, networks, choice, round_number, deployed)
