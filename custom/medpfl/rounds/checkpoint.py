# SPDX-License-Identifier: Apache-2.0
"""The server's checkpoints of a run: a file after every round, of which the last two are kept.

A hospital keeps its private state of three rounds (``rounds.private``), so that it has what fits to the older
checkpoint even where the newer one is damaged and the hospital had trained a further round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mixing import State
from medpfl.rounds.messages import flatten, unflatten

KIND = "server"
SHARED = "*"
"""The owner of a model that all hospitals share."""

Stack = dict[str, list[dict[str, Tensor]]]
"""Slot to the K hospitals' states."""


def compact(states: list[dict[str, Tensor]], roster: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Owner to state; one entry for everybody where all hospitals have the same."""
    same = all((state[key] == states[0][key]).all() for state in states[1:] for key in states[0])
    return {SHARED: states[0]} if same else dict(zip(roster, states, strict=True))


def save(
    folder: Path,
    done: int,
    slots: Mapping[str, Mapping[str, dict[str, Tensor]]],
    mixers: Mapping[str, dict[str, Tensor]],
    meta: Mapping[str, Any],
) -> None:
    """Write compacted slots, the components' state and ``meta`` (JSON values) after round ``done``; the checkpoint
    after the round before stays too."""
    tensors = {f"{slot}/{owner}": state for slot, states in slots.items() for owner, state in states.items()}
    tensors.update({f"mixer:{slot}/": state for slot, state in mixers.items()})
    store.save(store.path_of(folder, KIND, done), flatten(tensors), meta)
    store.prune(folder, KIND, done, 2)


@dataclass(frozen=True)
class Unfinished:
    """A run that can go on.

    Attributes:
        done: rounds that are finished.
        stack: slot to the K hospitals' states.
        mixers: slot to its component's state.
        meta: as it was saved.
    """

    done: int
    stack: Stack
    mixers: Mapping[str, State]
    meta: dict[str, Any]


def load(folder: Path, slots: Sequence[str], roster: Sequence[str]) -> tuple[Unfinished | None, list[str]]:
    """What ``save`` wrote of an unfinished run, None if there is none or it is finished; and sentences about what was
    lost. Where nothing is resumed, no checkpoint is left in the folder.

    Raises:
        MedPFLError: the checkpoint was written by another version of MedPFL, or cannot be opened.
    """
    kept, damaged = store.newest(folder, KIND)
    told = [f"the checkpoint after round {number} is damaged and not used" for number in damaged]
    if kept is None or kept.meta["finished"]:
        store.discard(folder, KIND)
        return None, [*told, "the run starts anew"] if damaged else []
    found = unflatten(kept.tensors)
    stack: Stack = {}
    for slot in slots:
        shared = found.get(f"{slot}/{SHARED}")
        states = [shared or found[f"{slot}/{site}"] for site in roster]
        stack[slot] = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
    mixers: dict[str, State] = {slot: found.get(f"mixer:{slot}/", {}) for slot in slots}
    told.append(f"resumed after round {kept.number} of an unfinished run")
    return Unfinished(kept.number, stack, mixers, kept.meta), told


def other_runs(folder: Path) -> list[str]:
    """A sentence on every run of this job with a checkpoint that a run with the state ``folder`` will not take up."""
    told = []
    for other in sorted(found for found in folder.parent.glob("*") if found != folder):
        rounds = store.numbered(other, KIND)
        if not rounds:
            continue
        try:
            meta = store.read_meta(rounds[max(rounds)])
        except MedPFLError:
            told.append(f"the checkpoint of run {other.name} is unreadable and left alone")
            continue
        if not meta["finished"]:
            who = f"round {max(rounds)}; {', '.join(meta['roster'])}"
            told.append(
                f"an unfinished run of this job ({who}) is kept and not resumed: its hospitals or settings differ"
            )
    return told
