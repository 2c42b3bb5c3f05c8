# SPDX-License-Identifier: Apache-2.0
"""Which hospitals count in a mean over the hospitals: all at which the metric is defined.

Where all of a hospital's test cases are of one class, say, no model has an AUC there, and the means are those of the
other hospitals, the same ones for every method. A hospital at which a single method has no value does count, so that
this method has no mean: a model that broke must not profit from it.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medpfl.compare.results import Results, Row
from medpfl.results.schema import Scores

Pair = tuple[int | None, int]
"""Split and seed."""


class Counted:
    """``found``: a run's split, and what a model reached at each hospital; of all runs and models."""

    def __init__(self, found: Iterable[tuple[int | None, Mapping[str, Scores]]], sites: Sequence[str]):
        self.sites = sites
        self._known = {
            (split, site, metric)
            for split, tested in found
            for site, scores in tested.items()
            for metric, value in scores.items()
            if value is not None
        }

    def of(self, metric: str, pairs: Sequence[Pair]) -> NDArray[np.bool_]:
        """Runs x hospitals."""
        found = [[(split, site, metric) in self._known for site in self.sites] for split, _ in pairs]
        return np.array(found, dtype=bool).reshape(len(pairs), len(self.sites))


def counted_in(content: Results) -> Counted:
    """Of a comparison's results; the first published files have the score of each hospital and no other metric."""

    def tested(row: Row, site: str, place: int) -> Scores:
        known = {name: one.hospitals[site] for name, one in row.metrics.items() if site in one.hospitals}
        known[content.score] = row.hospitals[site].best
        return {name: one.values[place] for name, one in known.items()}

    found = (
        (split, {site: tested(row, site, place) for site in content.hospitals})
        for row in content.rows
        for place, (split, _) in enumerate(row.pairs)
    )
    return Counted(found, content.hospitals)


def left_out(content: Results) -> list[str]:
    """In sentences, where a metric is not defined, the score first; none where all are everywhere."""
    told = (name for row in content.rows for name, found in row.metrics.items() if found.hospitals)
    named: dict[str, list[str]] = {}
    for name in dict.fromkeys([content.score, *told]):
        named.setdefault(_lacking(content, name), []).append(name.replace("_", " "))
    return [
        f"No model has {', '.join(names)} at {where}: means over the hospitals are those of the others."
        for where, names in named.items()
        if where
    ]


def _lacking(content: Results, metric: str) -> str:
    splits = list(dict.fromkeys(split for row in content.rows for split, _ in row.pairs))
    counts = counted_in(content).of(metric, [(split, 0) for split in splits])
    told = []
    for place, site in enumerate(content.hospitals):
        lacking = [split for split, there in zip(splits, counts[:, place], strict=True) if not there]
        if len(lacking) == len(splits):
            told.append(site)
        elif lacking:
            told.append(f"{site} in the split{'s' if len(lacking) > 1 else ''} {', '.join(map(str, lacking))}")
    return "; ".join(told)
