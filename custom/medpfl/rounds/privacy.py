# SPDX-License-Identifier: Apache-2.0
"""A hospital's noise in a job: whether it can be had, what it is added to, what it has cost, and when it is spent."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from medpfl.core.errors import BudgetSpent, ConfigError
from medpfl.core.frozen import is_frozen
from medpfl.core.groups import BATCH_NORM
from medpfl.data.policy import Policy
from medpfl.data.samples import SiteData
from medpfl.job import Job
from medpfl.methods.contract import Method
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.accountant import check_installed, epsilon, noise_for
from medpfl.privacy.contract import Mechanism, Privacy, Spent
from medpfl.privacy.ledger import Ledger
from medpfl.privacy.lots import RecordNoise
from medpfl.privacy.noise import Gaussian
from medpfl.rounds.hospital.networks import Networks
from medpfl.rounds.hospital.policy import check_privacy
from medpfl.rounds.messages import Slots
from medpfl.rounds.protocol.replies import TrainReply
from medpfl.rounds.protocol.requests import OfRun
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import Loss

SPENT = "this hospital's policy ('most_epsilon') allows at most"
"""How a hospital that trains no more begins its sentence."""
BEFORE = -1
"""Stands for the exchange of a round where its models are made ready before the training."""
Noise = RecordNoise | None
_INSTEAD = "build the network with norm 'group' (or 'instance')"


def check_statistics_wanted(job: Job, hospitals: int) -> None:
    """Raises ConfigError: the job asks for noise, and a component for statistics of the data, which have none."""
    if job.method.privacy is None:
        return
    for slot, mixer in job.mixers.items():
        for number in range(1, job.settings.rounds + 1):
            if name := mixer.wants(number, hospitals):
                raise _unprotected(f"{type(mixer).__name__} of slot '{slot}' asks for the statistics '{name}'")


def _unprotected(what: str) -> ConfigError:
    return ConfigError(f"{what} of the hospitals' data, which would leave without noise; this job asks for privacy")


def refuse_plan(policy: Policy, method: Method) -> None:
    """Raises ConfigError or PolicyRefused: the data's description would leave as it is, where noise is asked for."""
    check_privacy(policy, method.privacy)
    if method.privacy is not None:
        raise _unprotected("the server asks for a description")


class Guard:
    """What a hospital's messages of one job are given before they leave.

    Args:
        home: the hospital's folder of the job, in which its account lies.
        site: the hospital.
        policy: the hospital's.
        methods: the job's, then the references; all of the same privacy.
        rounds: of the job.
        gradients: slots of which gradients are sent.

    Raises:
        PolicyRefused: the policy asks for noise that the job does not have.
        MedPFLError: the ledger is damaged, or cannot be written.
    """

    def __init__(
        self, home: Path, site: str, policy: Policy, methods: Sequence[Method], rounds: int, gradients: Sequence[str]
    ):
        ledger = Ledger(home, site)
        self._how: Privacy | None = methods[0].privacy
        self._ledger, self._policy, self._methods = ledger, policy, methods
        self._rounds, self._gradients = rounds, set(gradients)
        self._made: list[RecordNoise] = []
        self._watched: list[_Watched] = []
        self._of_round: list[Mechanism] = []
        self._sigma: float | None = None
        self._fixed: set[str] = set()
        self._over = False
        self._log = logging.getLogger(f"{__name__}.{ledger.site}")
        check_privacy(policy, self._how)
        if self._how is not None:
            for method in methods:  # again, for a class whose __post_init__ does not call Method's
                method.cover.check(type(method).__name__, self._how.level)
            check_installed()
            ledger.open()

    def check(self, networks: Networks, task: Task, data: SiteData) -> None:
        """Whether these networks and this training can be protected.

        Raises:
            ConfigError: they cannot.
        """
        if isinstance(self._how, ClippedNoise):
            self._fixed = set(networks.fixed())
            for key in networks.untrained():
                raise ConfigError(
                    f"ClippedNoise cannot protect '{key}', which is sent and is no trained weight but a buffer, where "
                    f"layers keep statistics of the hospital's data: {_INSTEAD}, keep BatchNorm at home (FedBN), or if "
                    "it is a constant, leave it out of the network's state (persistent=False)"
                )
        if isinstance(self._how, DPSGD):
            _check_task(task, data)
            _check_travelling(networks)
            for method in self._noised():
                for name, network in networks.of(method).items():
                    if name not in method.cover.at_home:
                        _check_norms(name, network)
            self._sigma = self._how.noise_multiplier or self._noise_for_all(self._how, data)

    def _noised(self) -> list[Method]:
        """The methods of which something leaves."""
        return [method for method in self._methods if set(method.components()) - set(method.cover.at_home)]

    def _noise_for_all(self, how: DPSGD, data: SiteData) -> float:
        cases, steps = len(data.splits["train"].names), 0
        assert how.target_epsilon is not None
        for method in self._noised():
            if method.passes is None:
                kind = type(method).__name__
                raise ConfigError(f"DPSGD needs a noise_multiplier with {kind}, which varies its passes over the data")
            lots = method.steps or method.epochs * math.ceil(cases / method.batch_size)
            steps += self._rounds * method.passes * lots
        if not steps:  # nothing that has noise is trained; Opacus would look for its size for ever
            return math.inf
        rate = min(1.0, self._methods[0].batch_size / cases)
        return noise_for(how.target_epsilon, how.delta, rate, steps)

    def begin(self) -> None:
        """Before what is to be sent next is made.

        Raises:
            BudgetSpent: nothing more may be.
        """
        self._made, self._watched = [], []
        if self._over:
            raise self._refusal()

    def refuse_statistics(self, names: Sequence[str]) -> None:
        """Raises ConfigError: the job asks for noise, and the server for statistics."""
        if self._how is not None:
            raise _unprotected(f"the server asks for the statistics {', '.join(names)}")

    def noise(self, method: Method, header: OfRun, networks: nn.ModuleDict, step: int = 0) -> RecordNoise | None:
        """For a method's training that is sent next; None: it is trained without.

        Args:
            networks: of the method, by name, as they are before it.
        """
        if not isinstance(self._how, DPSGD) or method not in self._noised():
            return None
        assert self._sigma is not None
        stream = self._ledger.stream("record", header.run, header.round, step, type(method).__name__)
        made = RecordNoise(self._sigma, self._how.max_grad_norm, method.cover.at_home, stream)
        self._made.append(made)
        self._watched.append(_Watched(made, networks))
        return made

    def check_made(self, networks: Networks, asked: Slots, instead: Slots) -> None:
        """Whether steps with noise have made what is about to be sent; before anything is copied.

        Args:
            asked: the slots that are to be answered, as the server sent them.
            instead: what is sent instead of some slots' tensors.

        Raises:
            ConfigError: something else has, which has no noise: an optimiser of the method's own, or a statistic.
        """
        if not isinstance(self._how, DPSGD):
            return
        for watched in self._watched:
            watched.check()
        noised = {id(weight) for watched in self._watched for weight in watched.moved()}
        weights, state = dict(networks.models.named_parameters(remove_duplicate=False)), networks.state()
        for slot, keys in {**asked, **instead}.items():
            for key in keys:
                name = key.partition(".")[0]
                method = networks.owner.get(name, self._methods[0])
                now, before = instead.get(slot, state).get(key), asked.get(slot, {}).get(key)
                if name in method.cover.derived or id(weights.get(key)) in noised or _same(now, before):
                    continue
                raise ConfigError(
                    f"{type(method).__name__} changes '{key}', which is sent, and DPSGD has put no noise on it: train "
                    "it by 'site.step' on the batches of 'site.training_batches'; if it follows from weights with "
                    f"noise and public data alone, the method's cover must say so: Cover(derived=('{name}',))"
                )

    @property
    def compares(self) -> bool:
        """Whether what is sent is compared with what was received."""
        return isinstance(self._how, ClippedNoise)

    def release(self, sent: Slots, received: Slots, header: OfRun, step: int = 0) -> Slots:
        """What is sent instead of ``sent``, once it is written down. After this it may leave, and nothing else.

        Raises:
            BudgetSpent: it would cost more than the policy allows.
            ConfigError: the job would cost more than its ``target_epsilon``.
        """
        if self._how is None:
            return sent
        costs = [one for made in self._made for one in made.mechanisms()]
        if isinstance(self._how, ClippedNoise) and any(sent.values()):
            costs = [self._how.mechanism()]
        self._of_round = costs if step == 0 else [*self._of_round, *costs]
        if not costs:  # nothing that was learnt leaves
            return sent
        self._check_target()
        with self._ledger.alone():
            self._check_budget(costs)
            if isinstance(self._how, ClippedNoise):
                sent = self._noised_update(self._how, sent, received, header, step)
            self._ledger.release(costs, self._how.level)
        self._log.info("round %d: %s", header.round, self.spent)
        return sent

    def _noised_update(self, how: ClippedNoise, sent: Slots, received: Slots, header: OfRun, step: int) -> Slots:
        # What a network holds fixed goes back as it came: noise would move it, and it tells of nobody.
        still = {(slot, key) for slot, state in sent.items() for key in self._fixed & state.keys()}
        still = {(slot, key) for slot, key in still if slot not in self._gradients}
        if not step:
            still |= {(slot, key) for slot in self._waiting(sent) for key in sent[slot]}
        places = [(slot, key) for slot, state in sorted(sent.items()) for key in sorted(state)]
        places = [place for place in places if place not in still]
        base = [_base(sent[slot][key], slot in self._gradients, received, slot, key) for slot, key in places]
        difference = [sent[slot][key] - before for (slot, key), before in zip(places, base, strict=True)]
        total = Gaussian(difference, how.clip, how.noise_multiplier)
        total.add(difference)
        noised = total.with_noise(self._ledger.stream("update", header.run, header.round, step))
        found = {place: before + value for place, before, value in zip(places, base, noised, strict=True)}
        known = {slot: sent[slot] if slot in self._gradients else received[slot] for slot, _ in still}
        found.update({(slot, key): known[slot][key] for slot, key in still})
        return {slot: {key: found[slot, key] for key in state} for slot, state in sent.items()}

    def _waiting(self, sent: Slots) -> list[str]:
        """Slots of gradients that are zero at every hospital; noise alone would move what is not trained yet."""
        waiting = self._gradients.intersection(self._methods[0].waiting, sent)
        return [slot for slot in waiting if not any(tensor.any() for tensor in sent[slot].values())]

    def _check_budget(self, costs: Sequence[Mechanism]) -> None:
        most = self._policy.most_epsilon
        if most is not None and self._ledger.with_others(costs, self._policy.delta) > most:
            self._over = True
            raise self._refusal()

    def _check_target(self) -> None:
        if not isinstance(self._how, DPSGD) or self._how.target_epsilon is None:
            return
        whole = [one._replace(steps=one.steps * self._rounds) for one in self._of_round]
        if (cost := epsilon(whole, self._how.delta)) > self._how.target_epsilon * (1 + 1e-6):
            method = self._methods[0]
            raise ConfigError(
                f"{type(method).__name__} makes more steps with noise in a round than its 'passes' says "
                f"({method.passes}), so that the job would cost an epsilon of {cost:.3f} where its target_epsilon is "
                f"{self._how.target_epsilon:g}: say in the class how often a round goes through the training batches"
            )

    def _refusal(self) -> BudgetSpent:
        return BudgetSpent(
            f"{SPENT} {self._policy.most_epsilon:g} at delta "
            f"{self._policy.delta:g} over all jobs, and another round would pass it: the hospital trains no more and "
            "keeps its models"
        )

    def told(self, reply: TrainReply) -> TrainReply:
        """The reply with what the noise has cost, and without the losses, which may be of single cases."""
        return reply.model_copy(update={"loss": {}, "privacy": self.spent}) if self._how is not None else reply

    @property
    def spent(self) -> Spent | None:
        """What it has cost so far; None: the job asks for none."""
        if self._how is None:
            return None
        return self._ledger.spent(self._how.level, self._how.delta)


class _Watched:
    """What networks hold beside their weights before steps with noise: a layer of another package may keep statistics
    of its inputs there, which would leave as they are, or show in the gradients of all other cases."""

    def __init__(self, noise: RecordNoise, networks: nn.ModuleDict):
        self._noise, self._networks = noise, networks
        self._held = {name: _buffers(network) for name, network in networks.items()}

    def moved(self) -> list[nn.Parameter]:
        """The weights of the networks that steps with noise have moved."""
        return [weight for name in self._noise.networks for weight in self._networks[name].parameters()]

    def check(self) -> None:
        """Raises ConfigError: the steps have changed some of it."""
        for name in sorted(self._noise.networks):
            now = _buffers(self._networks[name])
            for key, before in self._held[name].items():
                if not before.equal(now[key]):
                    raise ConfigError(
                        f"DPSGD cannot train network '{name}': training changes its buffer '{key}', which is no "
                        "trained weight, so that no noise is on it: take a layer that keeps nothing of its inputs"
                    )


def _buffers(network: nn.Module) -> dict[str, Tensor]:
    """Those in its state (``Unkept`` looks at others), with zeros in place of NaN, which differs from itself."""
    state = network.state_dict()
    return {key: buffer.detach().clone().nan_to_num_() for key, buffer in network.named_buffers() if key in state}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return torch.equal(one.detach().cpu().nan_to_num(), other.detach().cpu().nan_to_num())


def _base(sent: Tensor, gradient: bool, received: Slots, slot: str, key: str) -> Tensor:
    return torch.zeros_like(sent) if gradient else received[slot][key]


def _check_travelling(networks: Networks) -> None:
    """Refuse what a server could ask for: a slot that stays at home by the job, and whose training has no noise."""
    for slot in networks.travelling:
        for key in networks.slots[slot]:
            name = key.partition(".")[0]
            if name in networks.owner[name].cover.at_home:
                raise ConfigError(
                    f"slot '{slot}' cannot leave under DPSGD: its network '{name}' is trained without noise"
                )


def _check_norms(name: str, network: nn.Module) -> None:
    for path, module in network.named_modules():
        if is_frozen(module):  # its statistics stand still, and no case of a batch is in what it makes of another
            continue
        if isinstance(module, BATCH_NORM) or getattr(module, "track_running_stats", False):
            raise ConfigError(
                f"DPSGD cannot train network '{name}': its layer '{path}' ({type(module).__name__}) mixes the cases of "
                f"a batch or keeps statistics of them: {_INSTEAD}"
            )


def _check_task(task: Task, data: SiteData) -> None:
    """Refuse a loss of several cases, and what goes by how many cases of each class the hospital has, without noise."""
    if task.by_batch:
        raise ConfigError(
            f"DPSGD cannot train {type(task).__name__}: its loss compares the cases of a batch, so that no case has a "
            "gradient of its own; ClippedNoise can protect the updates"
        )
    loss = getattr(task, "loss", None)
    train = data.splits["train"]
    order = task.order(train, torch.Generator().manual_seed(0)).sort().values
    if (isinstance(loss, Loss) and loss.by_own_counts) or not torch.equal(order, torch.arange(len(train))):
        raise ConfigError(
            f"DPSGD cannot train {type(task).__name__} as this job has it: its loss or its sampling balances the "
            "classes by the hospital's own numbers of cases, which have no noise"
        )
