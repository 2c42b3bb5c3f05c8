# SPDX-License-Identifier: Apache-2.0
"""Who was there until when: the rounds that each hospital trained in."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from medpfl.privacy.contract import Spent
from medpfl.results.schema import Event, Line, RoundLine, Stretch, TrainingLine, TrainingSummary

SERVER = "server"


def stretches(lines: Iterable[Line], roster: Sequence[str]) -> dict[str, list[Stretch]]:
    """Hospital to the first and last round of every stretch in which it trained.

    Args:
        lines: what was measured; a hospital whose update was mixed has a line of that round's training.
    """
    trained: dict[str, set[int]] = {site: set() for site in roster}
    for line in lines:
        if isinstance(line, TrainingLine):
            trained[line.site].add(line.round)
    return {site: _stretches(sorted(found)) for site, found in trained.items()}


def spent_in(lines: Iterable[Line], roster: Sequence[str]) -> dict[str, Spent]:
    """Hospital to what its noise had cost when it said so last in a round; without those that did not."""
    said = {line.site: line.privacy for line in lines if isinstance(line, TrainingLine)}
    return {site: spent for site in roster if (spent := said.get(site)) is not None}


def asked_in(lines: Iterable[Line], roster: Sequence[str]) -> dict[str, list[Stretch]]:
    """Hospital to the stretches of rounds that it was drawn for."""
    asked: dict[str, set[int]] = {site: set() for site in roster}
    for line in lines:
        if isinstance(line, RoundLine):
            for site in line.asked or ():
                asked[site].add(line.round)
    return {site: _stretches(sorted(found)) for site, found in asked.items()}


def absences(
    trained: Mapping[str, Sequence[Stretch]], rounds: int, asked: Mapping[str, Sequence[Stretch]] | None = None
) -> dict[str, str]:
    """A sentence on every hospital that missed a round.

    Args:
        asked: of a job that does not ask all in every round; a round that did not ask a hospital is not missed.
    """
    if asked:
        return {
            site: f"trained in {_rounds(found)} of {rounds}; it was asked in {_rounds(asked[site])}"
            for site, found in trained.items()
            if list(found) != list(asked[site])
        }
    return {
        site: f"trained in {_rounds(found)} of {rounds}" for site, found in trained.items() if not _whole(found, rounds)
    }


def _rounds(found: Sequence[Stretch]) -> str:
    return f"rounds {in_words(found)}" if found else "none"


def told(events: Sequence[Event]) -> list[str]:
    """Each event as a line; those of one hospital in the same words are one, with their rounds: of a hospital that
    refuses every round of a long job nobody needs as many equal sentences."""
    rounds: dict[tuple[str, str], set[int]] = {}
    for event in events:
        rounds.setdefault((event.site, event.event), set()).add(event.round)
    lines = []
    for (site, text), found in rounds.items():
        when = f"round{'s' * (len(found) > 1)} {in_words(_stretches(sorted(found)))}"
        lines.append(f"{when}, {site}: {text}")
    return lines


def presence(summary: TrainingSummary) -> dict[str, str]:
    """Hospital to the rounds that it trained in, in words, those first that took part; nothing where all of them
    trained in every round, and where the summary is of before it was written down."""
    rounds = summary.settings.rounds
    of_roster = {site: summary.trained.get(site, []) for site in summary.roster} if summary.trained else {}
    missing = {event.site for event in summary.events if event.round == 0} - {SERVER, *summary.roster}
    if not missing and all(_whole(found, rounds) for found in of_roster.values()):
        return {}
    found = {site: _shown(found, rounds, summary.asked.get(site)) for site, found in of_roster.items()}
    return {**found, **dict.fromkeys(sorted(missing), "took no part")}


def _shown(found: Sequence[Stretch], rounds: int, asked: Sequence[Stretch] | None) -> str:
    """The rounds that a hospital trained in, and where others asked it, those."""
    said = f"{in_words(found)} of {rounds}" if found else f"none of {rounds}"
    return said if asked is None or list(found) == list(asked) else f"{said}, asked in {in_words(asked)}"


def in_words(found: Sequence[Stretch]) -> str:
    """As "1-3, 7"."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _whole(found: Sequence[Stretch], rounds: int) -> bool:
    return sum(last - first + 1 for first, last in found) >= rounds


def _stretches(numbers: Sequence[int]) -> list[Stretch]:
    """1, 2, 3, 7 as (1, 3), (7, 7)."""
    if not numbers:
        return []
    starts = [numbers[0], *(later for earlier, later in pairwise(numbers) if later > earlier + 1)]
    ends = [*(earlier for earlier, later in pairwise(numbers) if later > earlier + 1), numbers[-1]]
    return list(zip(starts, ends, strict=True))
