# SPDX-License-Identifier: Apache-2.0
"""Who was there until when."""

from medpfl.results.presence import absences
from medpfl.results.schema import RoundLine, TrainingLine


def line(site: str, number: int) -> TrainingLine:
    return TrainingLine(site=site, round=number, seconds=1.0, loss={})


def test_only_who_missed_a_round_is_told_of() -> None:
    lines = [line("anna", number) for number in (1, 2, 3, 4, 5)]
    lines += [line("berta", number) for number in (1, 2, 5)] + [line("clara", number) for number in (1, 3, 5)]
    told = absences([*lines, RoundLine(round=5, seconds=1.0)], ["anna", "berta", "clara", "dora"], 5)
    assert told == {
        "berta": "trained in rounds 1-2, 5 of 5",
        "clara": "trained in rounds 1, 3, 5 of 5",
        "dora": "trained in none of 5",
    }
