# SPDX-License-Identifier: Apache-2.0
"""The server's checkpoint of a run: one file, written anew after every round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mixing import State
from medpfl.rounds.messages import flatten, unflatten

SHARED = "*"
"""The owner of a model that all hospitals share."""

Stack = dict[str, list[dict[str, Tensor]]]
"""Slot to the K hospitals' states."""


def compact(states: list[dict[str, Tensor]], roster: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Owner to state; one entry for everybody where all hospitals have the same."""
    same = all((state[key] == states[0][key]).all() for state in states[1:] for key in states[0])
    return {SHARED: states[0]} if same else dict(zip(roster, states, strict=True))


def save(
    path: Path, slots: dict[str, dict[str, dict[str, Tensor]]], mixers: dict[str, dict[str, Tensor]], meta: Any
) -> None:
    """Write compacted slots, the components' state and ``meta`` (JSON values)."""
    tensors = {f"{slot}/{owner}": state for slot, states in slots.items() for owner, state in states.items()}
    tensors.update({f"mixer:{slot}/": state for slot, state in mixers.items()})
    store.save(path, flatten(tensors), meta)


def load(
    path: Path, slots: Sequence[str], roster: Sequence[str]
) -> tuple[Stack, dict[str, State], dict[str, Any]] | None:
    """What ``save`` wrote of an unfinished run; None if there is none or it is finished."""
    if not path.exists():
        return None
    tensors, meta = store.read(path)
    if meta["finished"]:
        return None
    found = unflatten(tensors)
    stack: Stack = {}
    for slot in slots:
        shared = found.get(f"{slot}/{SHARED}")
        states = [shared or found[f"{slot}/{site}"] for site in roster]
        stack[slot] = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
    return stack, {slot: found.get(f"mixer:{slot}/", {}) for slot in slots}, meta


def other_runs(path: Path) -> list[str]:
    """A sentence on every checkpoint of this job that a run with checkpoint ``path`` will not take up."""
    told = []
    for other in sorted(path.parent.parent.glob(f"*/{path.name}")):
        if other == path:
            continue
        try:
            meta = store.read_meta(other)
        except MedPFLError:
            told.append(f"the checkpoint of run {other.parent.name} is unreadable and left alone")
            continue
        if not meta["finished"]:
            who = f"round {meta['done']}; {', '.join(meta['roster'])}"
            told.append(
                f"an unfinished run of this job ({who}) is kept and not resumed: its hospitals or settings differ"
            )
    return told
