# SPDX-License-Identifier: Apache-2.0
"""What a server component is: the rule that mixes one slot."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.checked import Checked
from medpfl.core.mixing import Matrix, State, WrongMix, a_kind, check_form, mix, restrict


@dataclass(frozen=True)
class RoundInfo:
    """What a component may know about the round it mixes.

    Attributes:
        roster: the K hospitals' names, sorted; every K-vector follows this order.
        sizes: K numbers of training samples.
        present: K flags, which hospitals answered this round.
        known: the K models of the slot that a component ``remembers``, which it must not change; else none.
        buffers: entries that are no trained weights, such as the statistics that layers keep of their inputs.
    """

    roster: tuple[str, ...]
    sizes: NDArray[np.float64]
    present: tuple[bool, ...]
    known: Sequence[State] = ()
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NoDefault:
    """Stands where a method has no component of its own for a slot: the job must name one.

    Attributes:
        advice: what to name, for the sentence that says so.
    """

    advice: str


class Mixer(Checked):
    """A server component: mixes the K hospitals' copies of one slot.

    Most components only say which K x K matrix they apply (``matrix``); one that is not a matrix overrides ``mix``.
    """

    travels: ClassVar[bool] = True
    """False: the slot stays at the hospital and the server never sees it."""
    takes: ClassVar[Literal["weights", "gradients"]] = "weights"
    """What hospitals send it; a job whose method sends the other is refused."""
    apart: ClassVar[str] = ""
    """When it sends a hospital what another one has sent, by itself or mixed with its own alone, which it can subtract,
    though all of three and more have answered; "": never. The list of what leaves says it."""

    least_asked: ClassVar[int] = 1
    """How many hospitals a job's rounds must ask at least, for it to do what it is there for."""

    @property
    def remembers(self) -> Literal["copies", "answers"] | None:
        """Which models the server keeps for it between rounds, beside what it mixes; see ``RoundInfo.known``.

        "copies": what every hospital was sent last. "answers": what every hospital sent last, this round's answers
        among them, and what all began with of one that never answered. What is small is its own matter (``state``).
        """
        return None

    def check(self, roster: Sequence[str]) -> None:
        """Refuse parameters that do not fit the roster; called once, before round 1.

        Raises:
            ConfigError: naming the parameter, the value and what this roster allows.
        """

    def check_length(self, rounds: int) -> None:
        """Refuse parameters with which a job of so many rounds would be over before they do anything.

        Raises:
            ConfigError: naming the parameter, the value and what the rounds allow.
        """

    def start(self, state: State) -> None:
        """Take the slot's initial tensors; called once, before round 1 of a run that does not resume."""

    def wants(self, round_number: int, hospitals: int) -> str | None:
        """Name of the statistics of the data that are needed of all ``hospitals`` before this round; none by
        default."""
        return None

    def check_statistics(self, statistics: State) -> None:
        """Refuse what one hospital told, if ``take_statistics`` could not use it.

        Raises:
            ConfigError: naming the entry.
        """

    def take_statistics(self, statistics: Sequence[State | None], info: RoundInfo) -> None:
        """Take what was wanted: K entries of float64 tensors, None for a hospital that sent none."""
        raise TypeError(f"{type(self).__name__} wants no statistics")

    def links(self, roster: Sequence[str]) -> list[tuple[str, str]] | None:
        """Pairs of hospitals that hear each other, where a network says so; None: there is no such network."""
        return None

    @abstractmethod
    def matrix(self, info: RoundInfo) -> Matrix:
        """The K x K row-stochastic matrix for the whole roster; absent hospitals are dropped afterwards."""

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix | None]:
        """Mix in place, for the models may lie in files that memory does not hold; returns the K new
        states, which may share tensors, and the matrix that was applied (None if there is no such matrix)."""
        matrix = restrict(self.matrix(info), info.present)
        return mix(matrix, states, in_place=True, may_share=True), matrix

    def state(self) -> dict[str, Tensor]:
        """What the component must remember between rounds, in memory; saved in the server's checkpoint."""
        return {}

    def load_state(self, state: State) -> None:
        """Take back what ``state`` returned."""


Entries = dict[str, tuple[object, object]]


def entries_of(state: State) -> Entries:
    """Entry to its shape and type."""
    return {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}


def check_mixed(result: object, given: Entries, roster: Sequence[str]) -> tuple[list[State], Matrix | None]:
    """What ``Mixer.mix`` returned, if it is that.

    Args:
        given: what each of the states that it was given has.

    Raises:
        WrongMix: with what was expected and got.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise WrongMix(f"its 'mix' must give the new states and the matrix or None, got {a_kind(result)}")
    states, matrix = result
    if not isinstance(states, (list, tuple)):
        raise WrongMix(f"its 'mix' must give a list of the {len(roster)} hospitals' new states, got {a_kind(states)}")
    if len(states) != len(roster):
        raise WrongMix(f"its 'mix' must give the {len(roster)} hospitals' new states, got {len(states)}")
    for site, state in zip(roster, states, strict=True):
        tensors = isinstance(state, Mapping) and all(isinstance(value, Tensor) for value in state.values())
        if not tensors or entries_of(state) != given:
            raise WrongMix(
                "its 'mix' must give every hospital the entries that it was given, tensors of the same shapes and "
                f"types; {site}'s new state has others"
            )
    if matrix is not None:
        check_form(matrix, len(roster))
    return list(states), matrix
