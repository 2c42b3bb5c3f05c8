# SPDX-License-Identifier: Apache-2.0
"""Who was there until when: the rounds that each hospital trained in."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from medpfl.results.schema import Line, TrainingLine


def absences(lines: Iterable[Line], roster: Sequence[str], rounds: int) -> dict[str, str]:
    """A sentence on every hospital that missed a round.

    Args:
        lines: what was measured; a hospital whose update was mixed has a line of that round's training.
        rounds: how many there were.
    """
    trained: dict[str, set[int]] = {site: set() for site in roster}
    for line in lines:
        if isinstance(line, TrainingLine):
            trained[line.site].add(line.round)
    return {
        site: f"trained in {f'rounds {_spans(sorted(found))}' if found else 'none'} of {rounds}"
        for site, found in trained.items()
        if len(found) < rounds
    }


def _spans(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    starts = [numbers[0], *(later for earlier, later in pairwise(numbers) if later > earlier + 1)]
    ends = [*(earlier for earlier, later in pairwise(numbers) if later > earlier + 1), numbers[-1]]
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
