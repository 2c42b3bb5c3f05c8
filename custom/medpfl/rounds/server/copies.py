# SPDX-License-Identifier: Apache-2.0
"""What the server mixes: for every slot the hospitals' copies and the component that mixes them."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from medpfl.core.errors import ConfigError, RefusedUpdate
from medpfl.core.mixers import Mixer, RoundInfo
from medpfl.core.mixers.contract import check_mixed, entries_of
from medpfl.core.mixing import Matrix, State, WrongMix, restrict
from medpfl.job.names import SERVER_FILE
from medpfl.rounds.messages import Slots, byte_count
from medpfl.rounds.sealing import check_sealed, mix_sealed, sealed_table, whole_numbers
from medpfl.rounds.server import checkpoint
from medpfl.rounds.server.bounds import Far, Updates, bound, updates_of
from medpfl.rounds.server.checkpoint import Stack
from medpfl.rounds.server.checks import Table, check_update
from medpfl.rounds.server.shelf import Shelf

_ANSWERS = "answers:"
"""Before a slot's name: what its component remembers of what the hospitals sent."""


@dataclass(frozen=True)
class _Looked:
    """An answer whose tensors passed the check as it came, and its updates."""

    sent: Slots
    updates: Updates


class Copies:
    """The K copies of every slot that travels.

    Args:
        mixers: slot to server component.
        roster: the hospitals' names, sorted; copy k is the k-th hospital's.
        shelf: where they lie.
        sealed: whether the hospitals encrypt them (``rounds.sealing``).
    """

    def __init__(self, mixers: Mapping[str, Mixer], roster: Sequence[str], shelf: Shelf, sealed: bool = False):
        self.mixers = dict(mixers)
        self.shelf, self.sealed = shelf, sealed
        self.shelf.copies += any(mixer.remembers == "answers" for mixer in self.mixers.values())
        self.travelling = [slot for slot, mixer in self.mixers.items() if mixer.travels]
        self.stack: Stack = {}
        self._roster = tuple(roster)
        self._looked: dict[str, _Looked] = {}
        for mixer in self.mixers.values():
            mixer.check(self._roster)

    def leave_out(self, slots: Slots, named: Mapping[str, Mixer]) -> list[str]:
        """What the hospitals' networks turn out not to have is not mixed; returns a sentence on each such slot.

        Args:
            slots: those that they have.
            named: slot to the component that the job names for it.

        Raises:
            ConfigError: the job names a component for a slot that they do not have.
        """
        lacking = [slot for slot in self.travelling if slot not in slots]
        has = ", ".join(slot for slot in self.mixers if slot not in lacking)
        for slot in lacking:
            if slot in named:
                component = f"component '{slot}' ({type(named[slot]).__name__})"
                raise ConfigError(
                    f"{SERVER_FILE}: {component}: the hospitals' networks have no such slot; they have: {has}. "
                    "Remove the component"
                )
            del self.mixers[slot]
            self.travelling.remove(slot)
        known = f"the hospitals' networks have no such part; they have: {has}"
        return [f"slot '{slot}' is not mixed: {known}" for slot in lacking]

    def start(self, slots: Slots) -> None:
        """All hospitals begin with the same tensors."""
        for slot in self.travelling:
            self.mixers[slot].start(slots[slot])
            known = whole_numbers(slots[slot]) if self.sealed else slots[slot]
            self.stack[slot] = [self.shelf.copy(known)] * len(self._roster)  # what is mixed are other tensors
            if self.mixers[slot].remembers == "answers":
                self.stack[_ANSWERS + slot] = list(self.stack[slot])

    def restore(self, stack: Stack, states: Mapping[str, State]) -> None:
        """Go on from a checkpoint's copies and components' states."""
        self.stack = stack
        for slot in self.travelling:
            self.mixers[slot].load_state(states[slot])

    def bound(
        self, slots: Sequence[str], sent: Mapping[str, Slots], buffers: Collection[str], limit: float | None
    ) -> list[Far]:
        """What of the hospitals' updates is far longer than the others'; see ``rounds.server.bounds``. Of what is
        encrypted the server cannot know."""
        if self.sealed:
            return []
        held = {site: self.of(site, slots) for site in sent}
        known = {site: one.updates for site, one in self._looked.items() if one.sent is sent.get(site)}
        return bound(slots, sent, held, self._gradients(slots), buffers, limit, known)

    def _gradients(self, slots: Collection[str]) -> list[str]:
        return [slot for slot in slots if self.mixers[slot].takes == "gradients"]

    def mix(self, slots: Sequence[str], sent: Mapping[str, Slots], info: RoundInfo) -> dict[str, Matrix]:
        """Mix the slots over the hospitals that answered; returns the matrices that were applied.

        Args:
            sent: hospital to what it answered; the tensors are mixed in place.

        Raises:
            ConfigError: a component gives something else than it should, naming it.
        """
        matrices: dict[str, Matrix] = {}
        self._looked.clear()
        self.shelf.begin_mixing()
        for slot in slots:
            # Mixing is in place. An absent hospital's copy is cloned first: it may still be downloading the old one.
            stack = [
                sent[site][slot] if site in sent else self.shelf.copy(kept)
                for site, kept in zip(self._roster, self.stack[slot], strict=True)
            ]
            known = () if self.sealed else self._known(slot, sent)
            try:
                mixed, matrix = self._mixed(self.mixers[slot], stack, dataclasses.replace(info, known=known))
            except WrongMix as error:
                raise ConfigError(f"component '{slot}' ({type(self.mixers[slot]).__name__}): {error}") from error
            self.stack[slot] = self.shelf.settle(mixed)
            if matrix is not None:
                matrices[slot] = matrix
        return matrices

    def _mixed(
        self, mixer: Mixer, stack: Sequence[dict[str, Tensor]], info: RoundInfo
    ) -> tuple[Sequence[State], Matrix | None]:
        """What a component makes of the copies, which may be of another package.

        Raises:
            WrongMix: it is something else than a component gives.
        """
        if self.sealed:
            matrix = restrict(mixer.matrix(info), info.present)
            return mix_sealed(matrix, stack), matrix
        given = entries_of(stack[0])
        return check_mixed(mixer.mix(stack, info), given, info.roster)

    def _known(self, slot: str, sent: Mapping[str, Slots]) -> Sequence[State]:
        """What a slot's component remembers, of this round's answers too."""
        remembered = self.mixers[slot].remembers
        if remembered == "answers":
            answers = [
                self.shelf.copy(sent[site][slot]) if site in sent else kept
                for site, kept in zip(self._roster, self.stack[_ANSWERS + slot], strict=True)
            ]
            self.stack[_ANSWERS + slot] = self.shelf.settle(answers)
            return self.stack[_ANSWERS + slot]
        return self.stack[slot] if remembered == "copies" else ()

    def look(self, site: str, sent: Slots, expected: Table, buffers: Collection[str]) -> None:
        """Look at an answer that has just come, while others are awaited: its values and the lengths of its updates.
        Neither depends on the others' answers; ``check`` and ``bound`` need not do it any more.

        Raises:
            RefusedUpdate: as ``check``.
        """
        if self.sealed or not sent.keys() <= expected.keys():
            return
        check_update(site, sent, {slot: expected[slot] for slot in sent}, buffers)
        updates = updates_of(list(sent), sent, self.of(site, list(sent)), self._gradients(sent), buffers)
        for update in updates.values():
            _ = update.about  # it remembers
        self._looked[site] = _Looked(sent, updates)

    def check(self, site: str, sent: Slots, expected: Table, buffers: Collection[str]) -> None:
        """Refuse an update that is not of the expected slots; see ``rounds.server.checks`` and ``rounds.sealing``.

        Raises:
            RefusedUpdate: naming the hospital, the entry, expected and got.
        """
        looked = self._looked.get(site)
        if looked is None or looked.sent is not sent or sent.keys() != expected.keys():
            (check_sealed if self.sealed else check_update)(site, sent, expected, buffers)

    def entries(self, expected: Table) -> Table:
        """Of the expected slots what the stack holds of each."""
        found = sealed_table(expected) if self.sealed else expected
        answers = [slot for slot in self.travelling if self.mixers[slot].remembers == "answers"]
        return {slot: found[slot] for slot in self.travelling} | {_ANSWERS + slot: found[slot] for slot in answers}

    def of(self, site: str, slots: Sequence[str]) -> Slots:
        """A hospital's copies."""
        index = self._roster.index(site)
        return {slot: self.stack[slot][index] for slot in slots}

    def byte_count(self, site: str) -> int:
        """Bytes of a hospital's copies as they are; of what is encrypted, one that nobody has mixed yet is empty."""
        return byte_count(self.of(site, self.travelling))

    def compact(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Slot to owner to state; one owner for all where all hospitals have the same."""
        return {slot: checkpoint.compact(states, self._roster) for slot, states in self.stack.items()}

    def states(self) -> dict[str, State]:
        """Slot to its component's state."""
        return {slot: self.mixers[slot].state() for slot in self.travelling}

    def links(self) -> dict[str, list[tuple[str, str]]]:
        """Slot to the pairs of hospitals that its component connects, where it connects any."""
        found = {slot: self.mixers[slot].links(self._roster) for slot in self.travelling}
        return {slot: pairs for slot, pairs in found.items() if pairs is not None}

    # -- statistics ---------------------------------------------------------------------------------------------------

    def wanted(self, round_number: int) -> dict[str, str]:
        """Slot to the statistics that its component needs before this round, where it needs any."""
        asked = {slot: self.mixers[slot].wants(round_number, len(self._roster)) for slot in self.travelling}
        return {slot: name for slot, name in asked.items() if name is not None}

    def check_statistics(self, site: str, wanted: Mapping[str, str], given: Slots) -> None:
        """Whether the components can use what one hospital told.

        Args:
            wanted: as ``wanted`` gave it.

        Raises:
            RefusedUpdate: naming the hospital.
        """
        for slot, name in wanted.items():
            try:
                self.mixers[slot].check_statistics(given[name])
            except ConfigError as error:
                raise RefusedUpdate(f"{site}: {error}") from error

    def take_statistics(self, wanted: Mapping[str, str], sent: Mapping[str, Slots], info: RoundInfo) -> None:
        """Hand them to the components.

        Args:
            wanted: as ``wanted`` gave it.
            sent: hospital to its statistics by name.
        """
        for slot, name in wanted.items():
            given = [sent[site][name] if site in sent else None for site in self._roster]
            self.mixers[slot].take_statistics(given, info)
