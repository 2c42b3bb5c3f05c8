# SPDX-License-Identifier: Apache-2.0
"""Further exchanges of a few slots within one round, where the method asks for them (FedSM's selector does)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from medpfl.core.mixing import Matrix
from medpfl.rounds.messages import Slots
from medpfl.rounds.protocol.replies import Plan
from medpfl.rounds.server.checkpoint import SHARED, Stack, compact

OF = "@"
"""Between the slot and the hospital in the name of a model that is shown."""


@dataclass
class Refining:
    """A round that is not over: exchange ``step`` of ``steps`` of ``slots`` with ``sites`` comes next.

    ``shown``: slots of which every hospital is sent all hospitals' models with the first step.
    """

    round: int
    slots: list[str]
    shown: list[str]
    steps: int
    sites: list[str]
    matrices: dict[str, Matrix]
    started: float | None
    step: int = 1


def refining(
    round_number: int,
    sites: Sequence[str],
    plan: Plan,
    travelling: Sequence[str],
    matrices: dict[str, Matrix],
    started: float | None,
) -> Refining | None:
    """The further exchanges of a round that ``sites`` have trained in; None: the plan has none, and it is over."""
    steps = plan.steps[round_number - 1]
    if not steps:
        return None
    slots, shown = ([slot for slot in asked if slot in travelling] for asked in (plan.refined, plan.shown))
    return Refining(round_number, slots, shown, steps, list(sites), matrices, started)


def show(stack: Stack, slots: Sequence[str], roster: Sequence[str]) -> Slots:
    """All hospitals' models of these slots as slots of a message; a model that all share, once."""
    return {f"{slot}{OF}{who}": state for slot in slots for who, state in compact(stack[slot], roster).items()}


def take_shown(slots: Slots, roster: Sequence[str]) -> dict[str, list[dict[str, Tensor]]]:
    """The inverse: slot to the models in the roster's order; what is not ``show``'s is left out."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, state in slots.items():
        slot, of, who = name.partition(OF)
        if of:
            found.setdefault(slot, {})[who] = state
    return {
        slot: [states[SHARED]] * len(roster) if SHARED in states else [states[site] for site in roster]
        for slot, states in found.items()
    }
