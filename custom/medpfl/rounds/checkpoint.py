# SPDX-License-Identifier: Apache-2.0
"""The server's checkpoint of a run: one file, written anew after every round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mixing import State
from medpfl.results.record import Saved
from medpfl.results.schema import BestRound, Typed
from medpfl.rounds.messages import flatten, unflatten

SHARED = "*"
"""The owner of a model that all hospitals share."""

Stack = dict[str, list[dict[str, Tensor]]]
"""Slot to the K hospitals' states."""


class About(Typed):
    """What a checkpoint says beside its tensors.

    Attributes:
        done: rounds that are finished.
        finished: whether the job is.
        best: model to its best round so far, and ``scores``: model to the hospitals' last known validation scores.
        record: what was measured.
        saved: when, in seconds since 1970.
    """

    done: int
    finished: bool
    roster: list[str]
    best: dict[str, BestRound]
    scores: dict[str, dict[str, float]]
    record: Saved
    saved: float


@dataclass(frozen=True)
class Checkpoint:
    """An unfinished run; ``mixers``: slot to its component's state."""

    stack: Stack
    mixers: dict[str, State]
    about: About


def compact(states: list[dict[str, Tensor]], roster: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Owner to state; one entry for everybody where all hospitals have the same."""
    same = all((state[key] == states[0][key]).all() for state in states[1:] for key in states[0])
    return {SHARED: states[0]} if same else dict(zip(roster, states, strict=True))


def save(
    path: Path, slots: Mapping[str, Mapping[str, dict[str, Tensor]]], mixers: Mapping[str, State], about: About
) -> None:
    """Write compacted slots and the components' state."""
    tensors = {f"{slot}/{owner}": state for slot, states in slots.items() for owner, state in states.items()}
    tensors.update({f"mixer:{slot}/": dict(state) for slot, state in mixers.items()})
    store.save(path, flatten(tensors), about.model_dump(mode="json"))


def load(path: Path, slots: Sequence[str], roster: Sequence[str]) -> Checkpoint | None:
    """What ``save`` wrote of an unfinished run; None if there is none or it is finished."""
    if not path.exists():
        return None
    tensors, meta = store.read(path)
    about = _about(path, meta)
    if about.finished:
        return None
    found = unflatten(tensors)
    stack: Stack = {}
    for slot in slots:
        shared = found.get(f"{slot}/{SHARED}")
        states = [shared or found[f"{slot}/{site}"] for site in roster]
        stack[slot] = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
    return Checkpoint(stack, {slot: found.get(f"mixer:{slot}/", {}) for slot in slots}, about)


def _about(path: Path, meta: store.Meta) -> About:
    try:
        return About.model_validate({key: value for key, value in meta.items() if key != "format"})
    except ValueError as error:  # pydantic's ValidationError
        raise MedPFLError(f"{path} is no checkpoint of this version of MedPFL: {error}") from error


def other_runs(path: Path) -> list[str]:
    """A sentence on every checkpoint of this job that a run with checkpoint ``path`` will not take up."""
    told = []
    for other in sorted(path.parent.parent.glob(f"*/{path.name}")):
        if other == path:
            continue
        try:
            about = _about(other, store.read_meta(other))
        except MedPFLError:
            told.append(f"the checkpoint of run {other.parent.name} is unreadable and left alone")
            continue
        if not about.finished:
            who = f"round {about.done}; {', '.join(about.roster)}"
            told.append(
                f"an unfinished run of this job ({who}) is kept and not resumed: its hospitals or settings differ"
            )
    return told
