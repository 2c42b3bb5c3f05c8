# SPDX-License-Identifier: Apache-2.0
"""The numbers of ``metrics.jsonl`` as trackers want them: whose, under which name, of which round."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from medpfl.results.schema import FinalLine, Line, TrainingLine, ValidationLine


class Scalar(NamedTuple):
    """One number.

    Attributes:
        site: the hospital; "mean" for the mean over hospitals, "server" for the server's own.
        name: with slashes: "validation/<model>/<metric>", "test/<choice>/<model>/<metric>", "train/loss/<network>",
            "train/seconds", "train/epsilon", "round/seconds".
        round: that the line itself names.
    """

    site: str
    name: str
    value: float
    round: int


def scalars(lines: Iterable[Line]) -> Iterator[Scalar]:
    """Every number of the lines that is defined; None, where a metric is not, is left out."""
    for line in lines:
        for name, value in _named(line):
            if value is not None:
                yield Scalar(line.site, name, value, line.round)


def _named(line: Line) -> Iterator[tuple[str, float | None]]:
    if isinstance(line, ValidationLine):
        yield from ((f"validation/{line.model}/{metric}", value) for metric, value in line.metrics.items())
    elif isinstance(line, FinalLine):
        yield from ((f"test/{line.choice}/{line.model}/{metric}", value) for metric, value in line.metrics.items())
    elif isinstance(line, TrainingLine):
        yield from ((f"train/loss/{network}", value) for network, value in line.loss.items())
        yield "train/seconds", line.seconds
        yield "train/epsilon", line.privacy.epsilon if line.privacy else None
    else:
        yield "round/seconds", line.seconds
