# SPDX-License-Identifier: Apache-2.0
"""Further exchanges of a few slots within one round, where the method asks for them (FedSM's selector does)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from medpfl.core.mixing import Matrix
from medpfl.rounds.messages import Message


@dataclass
class Refining:
    """A round that is not over: exchange ``step`` of ``steps`` of ``slots`` with ``sites`` comes next."""

    round: int
    slots: list[str]
    steps: int
    sites: list[str]
    matrices: dict[str, Matrix]
    started: float | None
    step: int = 1


def refining(
    round_number: int,
    accepted: Mapping[str, Message],
    travelling: Sequence[str],
    matrices: dict[str, Matrix],
    started: float | None,
) -> Refining | None:
    """What the hospitals' replies to "train" ask for; None: the round is over. All hospitals run the same method, so
    the first reply speaks for all."""
    asked = next(iter(accepted.values())).header.get("refine")
    if not asked:
        return None
    slots = [slot for slot in asked["slots"] if slot in travelling]
    return Refining(round_number, slots, int(asked["steps"]), list(accepted), matrices, started)
