# SPDX-License-Identifier: Apache-2.0
"""The steps of record-level privacy: lots of cases, a gradient of each case, clipping, noise, and the account of it.

The cases of a lot are shown to the method one after another, each as a batch of its own. So every gradient is exactly
that of one case, whatever the loss and the network are, and nothing of a case reaches another one's.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.layout import laid_out_like
from medpfl.core.seeding import seed_torch
from medpfl.privacy.accountant import merged
from medpfl.privacy.contract import Mechanism
from medpfl.privacy.noise import Gaussian, Stream


@dataclass(frozen=True)
class Lot:
    """A case's place: the ``number``-th, from 0, of the ``of`` in its lot.

    Attributes:
        passed: the pass over the data to which the lot belongs, and ``index``: the lot in it, both from 0.
        blank: of a lot into which no case came, one stands for it that does not count.
        expected: the expected number of cases.
        rate: the probability with which each of the hospital's cases is in it.
    """

    number: int
    of: int
    passed: int
    index: int
    expected: float
    rate: float
    blank: bool = False

    @property
    def last(self) -> bool:
        return self.number + 1 == self.of


class RecordNoise:
    """The noised steps of one method in one round.

    Args:
        noise_multiplier: sigma.
        max_grad_norm: C.
        at_home: networks whose steps have no noise.
        stream: of this method in this round and of no other time; see ``Ledger.stream``.
    """

    def __init__(self, noise_multiplier: float, max_grad_norm: float, at_home: Sequence[str], stream: Stream):
        self._sigma, self._clip, self._at_home, self._stream = noise_multiplier, max_grad_norm, set(at_home), stream
        self._open: dict[tuple[str, ...], Gaussian] = {}
        self._due: dict[tuple[str, ...], tuple[int, int, int]] = {}
        """Of networks the lot, and which of its cases, from 0, their step takes next."""
        self._made: Counter[tuple[int, int, float]] = Counter()
        self._passes = 0
        self.networks: set[str] = set()
        """Those that steps with noise have moved."""

    def lots(self, cases: int, size: int, lots: int) -> Iterator[tuple[Lot, int]]:
        """The cases of ``lots`` lots of the expected ``size``, one after another, each with its place.

        Torch's global generator (dropout) is seeded for every case, so that none depends on how many came before it.
        """
        rate, passed = min(1.0, size / cases), self._passes
        self._passes += 1
        numbers = self._stream.of("lots", passed).numbers()
        for index in range(lots):
            found = (numbers.uniform(cases) < rate).nonzero()[:, 0].tolist()
            for number, case in enumerate(found or [0]):
                seed_torch(self._stream.of("layers", passed, index, case).seed())
                yield Lot(number, max(1, len(found)), passed, index, rate * cases, rate, blank=not found), case

    def covers(self, networks: Sequence[str]) -> bool:
        """Whether a step of these networks is one with noise."""
        return not self._at_home.issuperset(networks)

    def refuse(self, networks: Sequence[str], method: str) -> None:
        """Raises ConfigError: every step of these networks must have noise, and the method's gradient would not."""
        if self.covers(networks):
            raise ConfigError(
                f"{method} makes gradients of its own, or of samples that 'site.training_batches' did not give, which "
                "DPSGD cannot protect"
            )

    def add(self, lot: Lot, networks: tuple[str, ...], weights: Sequence[Tensor], loss: Tensor) -> bool:
        """Take a case's gradient.

        Args:
            weights: those that the step moves, and that are trained.

        Returns:
            Whether it was the lot's last, and the gradients of the ``weights`` are now those of the step.

        Raises:
            ConfigError: the step does not take the lot's cases one after another, each once: a gradient of several
                together counts as that of one, which the noise does not hide.
        """
        here, due = (lot.passed, lot.index), self._due.get(networks)
        if lot.number == 0 and networks not in self._open and (due is None or due[:2] != here):
            self._open[networks] = Gaussian(weights, self._clip, self._sigma)
        elif networks not in self._open or due != (*here, lot.number):
            raise ConfigError(
                f"DPSGD shows a method one case after another, each as a batch, and the step of '{networks[0]}' does "
                "not take each of them once: call 'site.step' for every batch that 'site.training_batches' gives, "
                "before the next one"
            )
        self._due[networks] = *here, lot.number + 1
        if lot.blank:
            self._open[networks].add(None)
        else:
            found = torch.autograd.grad(loss, list(weights), allow_unused=True, materialize_grads=True)
            self._open[networks].add(found)
        if not lot.last:
            return False
        noised = self._open.pop(networks).with_noise(self._stream.of("noise", lot.passed, lot.index, networks))
        for weight, value in zip(weights, noised, strict=True):
            weight.grad = laid_out_like(weight, value / lot.expected)
        self._made[lot.passed, lot.index, lot.rate] += 1
        self.networks.update(networks)
        return True

    def mechanisms(self) -> list[Mechanism]:
        """What was made so far. Several steps of one lot see the same cases: they are one step whose sum is longer by
        the root of their number, with the same noise."""
        return merged(Mechanism(self._sigma / math.sqrt(count), rate, 1) for (_, _, rate), count in self._made.items())
