# SPDX-License-Identifier: Apache-2.0
"""One figure of several runs: means and deviations, gains, matrices, calibration, what a super model chose."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medpfl.compare.counted import Counted, Pair
from medpfl.compare.results import Gain, HospitalRow, MetricStat, Reach, Selection, Stat, Worst
from medpfl.compare.run_results import Bins, ModelRow, SuperRow
from medpfl.compare.statistics import paired_gain
from medpfl.results.differences import QUANTILES
from medpfl.results.schema import Scores
from medpfl.tasks.metrics.digits import rounded
from medpfl.tasks.metrics.measure import Measure


def stat(values: NDArray[np.float64]) -> Stat:
    """Mean and sample deviation over the seeds; None where a value is missing."""
    known = [None if np.isnan(value) else rounded(float(value)) for value in values]
    whole = np.array([value for value in known if value is not None])
    return Stat(
        mean=float(whole.mean()) if len(whole) == len(known) else None,
        sd=float(whole.std(ddof=1)) if len(whole) == len(known) > 1 else None,
        values=known,
    )


def of_hospitals(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean over the hospitals that count, run by run; NaN where one of them has no value, or none counts.

    Args:
        values, counted: runs x hospitals.
    """
    count = counted.sum(axis=1)
    total: NDArray[np.float64] = np.where(counted, values, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def any_counts(counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of each run, whether any hospital counts in its mean."""
    found: NDArray[np.bool_] = counted.sum(axis=1) > 0
    return found


def metrics(
    found: list[dict[str, Scores]], sites: list[str], pairs: Sequence[Pair], counted: Counted | None
) -> dict[str, MetricStat]:
    """Every metric of the best round's test, mean over the hospitals' models and model by model.

    Args:
        found: of each run, the test of each hospital's model.
        pairs: split and seed of each run.
        counted: says which hospitals count in the mean; None: all.
    """
    names = sorted({name for tested in found for metrics in tested.values() for name in metrics})
    values = {
        name: np.array([[tested.get(site, {}).get(name) for site in sites] for tested in found], dtype=float)
        for name in names
    }
    counts = {name: counted.of(name, pairs) if counted else np.ones(each.shape, bool) for name, each in values.items()}
    return {
        name: MetricStat(
            **dict(stat(of_hospitals(value, counts[name]))),
            hospitals={site: stat(value[:, place]) for place, site in enumerate(sites)},
        )
        for name, value in values.items()
    }


def gain(
    scores: NDArray[np.float64],
    reference: NDArray[np.float64],
    counted: NDArray[np.bool_],
    measure: Measure,
    splits: Sequence[int | None] = (),
) -> Gain | None:
    """By how much ``scores`` are better than ``reference``, pair by pair; None where there is no pair, or one that
    counts lacks a score: a model that broke must not profit from it.

    Args:
        counted: of each pair, whether the score is defined for some model; ``splits``: as ``paired_gain`` takes them.
    """
    known = np.isfinite(scores) & np.isfinite(reference)
    if not known.any() or bool((counted & ~known).any()):
        return None
    better, worse = (scores, reference) if measure.direction == "higher" else (reference, scores)
    return paired_gain(better.tolist(), worse.tolist(), splits)


def curve(curves: list[list[float | None]]) -> list[float | None]:
    """Mean by round, of the runs that have a score there."""
    by_round = [[value for value in found if value is not None] for found in zip(*curves, strict=True)]
    return [rounded(float(np.mean(known))) if known else None for known in by_round]


def reach(
    curves: list[list[float | None]], target: float | None, traffic: int, seconds: float | None, measure: Measure
) -> Reach | None:
    """First round whose mean validation score is at least as good as ``target``: median over the runs that reached it,
    with what one hospital had sent and received and how long it had worked by then."""
    if target is None or not curves:
        return None
    there = [
        [at for at, value in enumerate(curve, 1) if value is not None and measure.reaches(value, target)]
        for curve in curves
    ]
    rounds = [found[0] if found else None for found in there]
    reached = [value for value in rounds if value is not None]
    median = float(np.median(reached)) if reached else None
    return Reach(
        rounds=rounds,
        median_round=median,
        reached=len(reached),
        bytes_per_hospital=None if median is None else round(median * traffic),
        seconds=None if median is None or seconds is None else round(median * seconds, 3),
    )


def cross(found: list[ModelRow], sites: list[str]) -> list[list[float | None]]:
    """Row: whose model; column: whose test data; mean over the seeds."""
    values = np.array([[[part.cross[a][b] for b in sites] for a in sites] for part in found], dtype=float)
    mean = values.mean(axis=0)
    return [[None if np.isnan(value) else rounded(float(value)) for value in line] for line in mean]


def calibration(found: list[ModelRow], sites: list[str]) -> dict[str, Bins] | None:
    """Expected calibration error and Brier score by hospital, mean over the runs, and the bins of all runs together;
    None where they are not defined."""
    table = {site: [bins for part in found if (bins := part.calibration[site]) is not None] for site in sites}
    if any(len(each) < len(found) for each in table.values()):
        return None
    return {
        site: Bins(
            ece=float(np.mean([each.ece for each in known])),
            brier=float(np.mean([each.brier for each in known])),
            bins=np.sum([each.bins for each in known], axis=0).round(6).tolist(),
        )
        for site, known in table.items()
    }


def selection(found: list[ModelRow], sites: list[str]) -> Selection | None:
    """Of a super model: the gammas that validation chose, and of each hospital's test cases the share that each model
    served, all runs together; None for other models."""
    rows = [part for part in found if isinstance(part, SuperRow)]
    if len(rows) < len(found):
        return None
    served = {}
    for site in sites:
        counts = {name: sum(part.served[site][name] for part in rows) for name in rows[0].served[site]}
        served[site] = {name: round(count / sum(counts.values()), 6) for name, count in counts.items()}
    return Selection(gammas=[part.gamma for part in rows], served=served)


def worst(hospitals: Mapping[str, HospitalRow], measure: Measure) -> Worst | None:
    means = {site: found.best.mean for site, found in hospitals.items() if found.best.mean is not None}
    worst = max(means, key=lambda site: measure.rank(means[site]), default=None)
    return None if worst is None else Worst(hospital=worst, score=means[worst])


def mean_differences(found: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Slot to the mean over the runs of each quantile of the SDWD.

    A run whose hospitals end with one model does not name the slot: nothing differs there.
    """
    same = [0.0] * len(QUANTILES)
    slots = sorted({slot for each in found for slot in each})
    return {slot: np.mean([each.get(slot, same) for each in found], axis=0).tolist() for slot in slots}
