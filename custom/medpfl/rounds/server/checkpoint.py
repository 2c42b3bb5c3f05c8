# SPDX-License-Identifier: Apache-2.0
"""The server's checkpoints of a run: a file after every round, of which the last two are kept.

A hospital keeps its private state of three rounds (``rounds.hospital.private``), so that it has what fits to the older
checkpoint even where the newer one is damaged and the hospital had trained a further round.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mapped import pieces
from medpfl.core.mixing import State
from medpfl.results.schema import BestRound, Typed
from medpfl.rounds.announcing import versions
from medpfl.rounds.messages import flatten, unflatten
from medpfl.rounds.server.history import Kept
from medpfl.rounds.server.shelf import Shelf

KIND = "server"
MODELS = "models"
"""Folder of the models that lie in files of their own."""
SHARED = "*"
"""The owner of a model that all hospitals share."""

Stack = dict[str, list[dict[str, Tensor]]]
"""Slot to the K hospitals' states."""


class About(Typed):
    """What a checkpoint says beside its tensors.

    Attributes:
        done: rounds that are finished.
        finished: whether the job is.
        best: model to its best round so far, and ``scores``: model to the hospitals' last known validation scores;
            ``more``: models that more hospitals have scored since their best round was chosen.
        history: where what was measured is.
        saved: when, in seconds since 1970.
        begun: what tells the run from one with the same key that began before.
        asked: see ``Record.asked``; of what was measured a part may be damaged.
        versions: package to version, at the server that wrote it.
        files: where models lie in files of ``MODELS`` (``rounds.server.shelf``), slot to the K hospitals' files, and
            ``digests``: file to the SHA-256 of its tensors.
    """

    done: int
    finished: bool
    roster: list[str]
    best: dict[str, BestRound]
    scores: dict[str, dict[str, float]]
    history: Kept
    saved: float
    begun: str = ""
    more: list[str] = Field(default_factory=list, exclude_if=lambda found: not found)
    asked: list[str] = Field(default_factory=list, exclude_if=lambda found: not found)
    versions: dict[str, str] = Field(default_factory=dict)
    files: dict[str, list[str]] = Field(default_factory=dict, exclude_if=lambda found: not found)
    digests: dict[str, str] = Field(default_factory=dict, exclude_if=lambda found: not found)


@dataclass(frozen=True)
class Checkpoint:
    """An unfinished run; ``mixers``: slot to its component's state."""

    stack: Stack
    mixers: dict[str, State]
    about: About


def compact(states: list[dict[str, Tensor]], roster: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Owner to state; one entry for everybody where all hospitals have the same."""
    same = all(state is states[0] or _equal(state, states[0]) for state in states[1:])
    return {SHARED: states[0]} if same else dict(zip(roster, states, strict=True))


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        mine.shape == theirs.shape
        and mine.dtype == theirs.dtype
        and all(torch.equal(*parts) for parts in pieces(mine, theirs))
        for mine, theirs in ((one[key], other[key]) for key in one)
    )


def save(
    folder: Path, slots: Mapping[str, Mapping[str, dict[str, Tensor]]], mixers: Mapping[str, State], about: About
) -> None:
    """Write compacted slots and the components' state; the checkpoint of the round before stays too."""
    tensors = {f"{slot}/{owner}": state for slot, states in slots.items() for owner, state in states.items()}
    tensors.update({f"mixer:{slot}/": dict(state) for slot, state in mixers.items()})
    store.save(store.path_of(folder, KIND, about.done), flatten(tensors), about.model_dump(mode="json"))
    store.prune(folder, KIND, about.done, 2)


def load(
    folder: Path, slots: Mapping[str, Collection[str]], roster: Sequence[str], shelf: Shelf
) -> tuple[Checkpoint | None, list[str]]:
    """What ``save`` wrote of an unfinished run, None if there is none or it is finished; and sentences about what was
    lost. Where nothing is resumed, no checkpoint is left in the folder.

    Args:
        slots: slot to its entries, as the hospitals send them.
        shelf: of the run; is left without files where nothing is resumed.

    Raises:
        MedPFLError: the checkpoint was written by another version of MedPFL, or cannot be opened.
    """
    kept, damaged = store.newest(folder, KIND)
    lying: Stack = {}
    while kept is not None:
        said = _about(folder, kept.meta)
        try:
            lying = {} if said.finished or not said.files else shelf.restore(said.files, said.digests)
            break
        except store.DamagedFile:
            kept, more = store.newest(folder, KIND, kept.number - 1)
            damaged += [said.done, *more]
    told = [f"the checkpoint after round {number} is damaged and not used" for number in damaged]
    about = _about(folder, kept.meta) if kept else None
    if kept is None or about is None or about.finished:
        store.discard(folder, KIND)
        shelf.forget()
        return None, [*told, "the run starts anew"] if damaged else []
    found = unflatten(kept.tensors)
    stack: Stack = {}
    for slot, entries in slots.items():
        shared = found.get(f"{slot}/{SHARED}")
        states = lying.get(slot) or [shared or found.get(f"{slot}/{site}", {}) for site in roster]
        fullest = max(states, key=len)  # of what is encrypted, a copy that nobody has mixed yet is empty
        if set(fullest) != set(entries):
            other = sorted(set(fullest) ^ set(entries))[0]
            raise MedPFLError(
                f"{folder} holds a checkpoint of another version of MedPFL (the entry '{other}' of slot '{slot}' is in "
                "it or in the hospitals' networks, and not in both): remove the folder to start the run anew"
            )
        stack[slot] = states
    told.append(f"resumed after round {about.done} of an unfinished run")
    if changed := _changed(about.versions, versions()):
        told.append(f"the rounds before were made with {changed}; all rounds with one of them may end otherwise")
    return Checkpoint(stack, {slot: found.get(f"mixer:{slot}/", {}) for slot in slots}, about), told


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Packages whose version at the server is another one now; "" where there is none, or nothing is known."""
    return ", ".join(
        f"{package} {version}, and {package} is {now[package]} now"
        for package, version in before.items()
        if now.get(package, version) != version
    )


def _about(path: Path, meta: store.Meta) -> About:
    try:
        return About.model_validate({key: value for key, value in meta.items() if key != "format"})
    except ValueError as error:  # pydantic's ValidationError
        raise MedPFLError(f"{path} is no checkpoint of this version of MedPFL: {error}") from error


def other_runs(folder: Path) -> list[str]:
    """A sentence on every run of this job with a checkpoint that a run with the state ``folder`` will not take up."""
    told = []
    for other in sorted(found for found in folder.parent.glob("*") if found != folder):
        rounds = store.numbered(other, KIND)
        if not rounds:
            continue
        try:
            about = _about(other, store.read_meta(rounds[max(rounds)]))
        except MedPFLError:
            told.append(f"the checkpoint of run {other.name} is unreadable and left alone")
            continue
        if not about.finished:
            who = f"round {about.done}; {', '.join(about.roster)}"
            told.append(
                f"an unfinished run of this job ({who}) is kept and not resumed: its hospitals, settings, code, "
                "checkpoints, public data or key differ"
            )
    return told
