# SPDX-License-Identifier: Apache-2.0
"""A comparison's hospitals choose: what each would take by its own validation cases, and how that does on its test."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from medpfl.compare import aggregate, intervals
from medpfl.compare.counted import Pair
from medpfl.compare.patients import Sheets
from medpfl.compare.results import ChosenRow, Gain
from medpfl.deployed.choice import choose
from medpfl.tasks.metrics.certainty import Interval
from medpfl.tasks.metrics.contract import CaseMetric, at_threshold, threshold_for
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet

AVERAGE = "average"
ALL = "all of them"


@dataclass(frozen=True)
class Rows:
    """Row to run (split and seed) to what its models said.

    Attributes:
        local: the row of local training.
        ratio: of repeated splits, test samples to training samples at each hospital; None: there is one split.
        counted: of runs, which hospitals count in the mean; runs x hospitals.
    """

    sheets: Mapping[str, Mapping[Pair, Sheets]]
    sites: Sequence[str]
    measure: Measure
    local: str
    ratio: Mapping[str, float] | None
    counted: Callable[[Sequence[Pair]], NDArray[np.bool_]]
    _draws: dict[tuple[str, tuple[Pair, ...], str], NDArray[np.float64]] = field(default_factory=dict, init=False)

    def certain(self, name: str, other: str, mean: Gain, hospitals: Mapping[str, Gain]) -> tuple[Gain, dict[str, Gain]]:
        """The gains of a row over another one with intervals: the mean of the hospitals' and each one's."""
        pairs = [pair for pair in self.sheets[name] if pair in self.sheets[other]]
        mine = [self.sheets[name][pair] for pair in pairs]
        return self._certain(mine, partial(self._drawn, name, pairs), other, pairs, mean, hospitals)

    def _drawn(self, name: str, pairs: Sequence[Pair], site: str) -> NDArray[np.float64]:
        """A row's draws at a hospital (``intervals.resampled``), made once: it is set beside several others."""
        key = (name, tuple(pairs), site)
        if key not in self._draws:
            self._draws[key] = intervals.resampled([self.sheets[name][pair][site]["test"] for pair in pairs], site)
        return self._draws[key]

    def _certain(
        self,
        mine: Sequence[Sheets],
        drawn: Callable[[str], NDArray[np.float64]],
        other: str,
        pairs: Sequence[Pair],
        mean: Gain,
        hospitals: Mapping[str, Gain],
    ) -> tuple[Gain, dict[str, Gain]]:
        theirs = [self.sheets[other][pair] for pair in pairs]
        if self.ratio is not None:
            return self._by_splits(mine, theirs, pairs, mean, hospitals, self.ratio)
        draws = {}
        for site in self.sites:
            one, two = drawn(site), self._drawn(other, pairs, site)
            draws[site] = one - two if self.measure.direction == "higher" else two - one
        of = {site: mine[0][site]["test"].patients for site in self.sites}
        # Of a single patient nothing varies, as if it were sure.
        each = {
            site: intervals.of_mean([draws[site]], [of[site]], len(pairs)) if of[site] > 1 else (None, 2.0)
            for site in self.sites
        }
        counting = [site for site, counts in zip(self.sites, self.counted(pairs)[0], strict=True) if counts]
        whole, count = None, 2.0
        if all(each[site][0] is not None for site in counting):
            whole, count = intervals.of_mean(
                [draws[site] for site in counting], [of[site] for site in counting], len(pairs)
            )
        return _with(mean, whole, count), {site: _with(gain, *each[site]) for site, gain in hospitals.items()}

    def _by_splits(
        self,
        mine: Sequence[Sheets],
        theirs: Sequence[Sheets],
        pairs: Sequence[Pair],
        mean: Gain,
        hospitals: Mapping[str, Gain],
        ratio: Mapping[str, float],
    ) -> tuple[Gain, dict[str, Gain]]:
        """The same over repeated splits; seeds of a split are no further splits."""
        table = np.array([
            [self.measure.gain(one[site]["test"].score, two[site]["test"].score) for site in self.sites]
            for one, two in zip(mine, theirs, strict=True)
        ])  # fmt: skip
        splits, counted = [split for split, _ in pairs], self.counted(pairs)
        means = intervals.by_split(aggregate.of_hospitals(table, counted), splits)
        table = intervals.by_split(table, splits)
        even = len(set(Counter(splits).values())) == 1  # else a run is missing: the gain is not the splits' mean

        def certain(gain: Gain, values: NDArray[np.float64], ratio: float) -> Gain:
            found = intervals.corrected(values.tolist(), ratio) if even else None
            known = even and len(values) > 1 and bool(np.isfinite(values).all())
            needed = intervals.needed(
                gain.mean, float(values.std(ddof=1)) if known else None, found, len(values), ratio
            )
            return gain.model_copy(update={"interval": found, "needed": needed})

        known = [ratio[site] for site, counts in zip(self.sites, counted.T, strict=True) if counts.any()]
        columns = dict(zip(self.sites, table.T, strict=True))
        each = {site: certain(gain, columns[site], ratio[site]) for site, gain in hospitals.items()}
        return certain(mean, means, float(np.mean(known or list(ratio.values())))), each

    def choose(self, name: str, labels: Sequence[str]) -> ChosenRow | None:
        """What hospitals take that hold the models of these rows; None where a run of theirs is missing."""
        names = list(dict.fromkeys([self.local, *labels]))
        pairs = [pair for pair in self.sheets[self.local] if all(pair in self.sheets[label] for label in names)]
        if not pairs:
            return None
        taken: list[Sheets] = []
        picks: dict[str, Counter[str]] = {site: Counter() for site in self.sites}
        for pair in pairs:
            held = {}
            for site in self.sites:
                model, sheet = self._take({label: self.sheets[label][pair][site] for label in names}, pair, site)
                picks[site][model] += 1
                held[site] = {"test": sheet}
            taken.append(held)
        scores = np.array([[run[site]["test"].score for site in self.sites] for run in taken])
        alone = np.array([[self.sheets[self.local][pair][s]["test"].score for s in self.sites] for pair in pairs])
        counts = self.counted(pairs)
        means = aggregate.of_hospitals(scores, counts)
        own = aggregate.of_hospitals(alone, counts)
        splits = [split for split, _ in pairs]
        mean = aggregate.gain(means, own, aggregate.any_counts(counts), self.measure, splits)
        each = {
            site: aggregate.gain(scores[:, k], alone[:, k], counts[:, k], self.measure, splits)
            for k, site in enumerate(self.sites)
        }
        if mean is None:
            return None
        gains = {site: gain for site, gain in each.items() if gain is not None}
        mean, hospitals = self._certain(
            taken,
            lambda site: intervals.resampled([run[site]["test"] for run in taken], site),
            self.local,
            pairs,
            mean,
            gains,
        )
        return ChosenRow(
            name=name,
            score=aggregate.stat(means),
            gain=mean,
            hospitals=hospitals,
            picks={site: dict(found.most_common()) for site, found in picks.items()},
            below=[site for site, gain in hospitals.items() if gain.interval and gain.interval[1] < 0],
        )

    def _take(self, held: Mapping[str, dict[str, Sheet]], pair: Pair, site: str) -> tuple[str, Sheet]:
        """As ``rounds.hospital.choosing`` does it at the hospital."""
        validation = {label: each["validation"] for label, each in held.items() if "validation" in each}
        if not validation:
            return self.local, held[self.local]["test"]
        test = {label: each["test"] for label, each in held.items()}
        known = [label for label, sheet in validation.items() if np.isfinite(sheet.score)]
        if len(known) > 1 and not isinstance(validation[self.local].metric, CaseMetric):
            mean = averaged([validation[label] for label in known])
            # As every model, the average has the threshold that its own answers to the validation cases suggest.
            (metric,) = at_threshold([mean.metric], threshold_for([mean.metric], mean.answers, mean.truth))
            validation[AVERAGE] = replace(mean, metric=metric)
            test[AVERAGE] = replace(averaged([test[label] for label in known]), metric=metric)
        model = choose(validation, self.local, self.measure, pair[1], site, "validation").model
        return model, test[model]


def _with(gain: Gain, found: Interval | None, count: float) -> Gain:
    needed = intervals.needed(gain.mean, gain.deviation, found, count)
    return gain.model_copy(update={"interval": found, "needed": needed})


def averaged(sheets: Sequence[Sheet]) -> Sheet:
    """The mean of several models' probabilities, or of the numbers that they predict; not of masks, of which only the
    scores are kept."""
    return replace(sheets[0], answers=torch.stack([sheet.answers.double() for sheet in sheets]).mean(dim=0))
