# SPDX-License-Identifier: Apache-2.0
"""Whose answers do not count and why, and whether those of enough hospitals do."""

import logging
from collections.abc import Collection, Sequence

from medpfl.core.errors import MedPFLError
from medpfl.results.record import Record

LONGEST = 1200
"""Characters of a reason. It may repeat what a hospital says of itself, which may have millions."""


class QuorumLost(MedPFLError):
    """Fewer hospitals answered than the job needs."""


class Quorum:
    """Keeps a job's account of its hospitals in the record's events.

    Args:
        roster: the hospitals' names.
        least: how many must answer.
    """

    def __init__(self, record: Record, roster: Sequence[str], least: int):
        self.least = least
        self._record, self._roster = record, roster
        self._log = logging.getLogger(__name__)

    def refuse(self, site: str, round_number: int, reason: str) -> None:
        """Note why a hospital's answer does not count."""
        reason = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]} [...]"
        self._record.event(round_number, site, reason)
        self._log.warning("round %d: %s: %s", round_number, site, reason)

    def check(self, round_number: int, accepted: Collection[str], did: str) -> None:
        """Enough hospitals must have done something.

        Args:
            round_number: 0: before the first.
            did: what, for the sentence.

        Raises:
            QuorumLost: with what kept the others from it.
        """
        if len(accepted) >= self.least:
            return
        when = f"round {round_number}: " if round_number else "only "
        reasons = "".join(
            f"; {e.site} {e.event}" for e in self._record.events if e.round == round_number and e.site in self._roster
        )
        raise QuorumLost(
            f"{when}{len(accepted)} of {len(self._roster)} hospitals {did} ({', '.join(accepted) or 'none'}); the job "
            f"needs {self.least}{reasons}"
        )
