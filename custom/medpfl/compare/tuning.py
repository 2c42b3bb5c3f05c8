# SPDX-License-Identifier: Apache-2.0
"""A search of arguments with an equal budget: every method gets the same number of candidates, the references too.

Optuna proposes the candidates. Of lists of values they are a grid's points, known beforehand; where an argument has a
range they come from its tree-structured Parzen estimator (Bergstra and others 2011), which looks at the scores so far.

A candidate is judged by the mean, over the tuning seeds, of the best round's mean validation score. These seeds take no
part in the final runs, and no test set is read. Where data are split several times, each split has a search of its own,
so that no case which tests in a split has a say in what is chosen for it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import JsonValue

from medpfl.compare.entries import Entry
from medpfl.compare.file import Arguments, Axes, Comparison, Range
from medpfl.compare.results import Candidate, SearchResult
from medpfl.compare.run_results import SearchRun
from medpfl.compare.runs import Run
from medpfl.core.errors import ConfigError
from medpfl.core.extras import require
from medpfl.core.seeding import derive_seed
from medpfl.tasks.metrics.measure import Measure

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

DIGITS = 4
"""Significant digits of a number that is proposed from a range."""


@dataclass(frozen=True)
class Search:
    """One method's candidates on one split, as many as are known yet, each with a run for every tuning seed."""

    name: str
    split: int | None
    candidates: list[Entry]
    runs: list[list[Run]]


def candidates_of(
    file: Comparison, name: str, split: int | None, measure: Measure, scores: Sequence[float | None] = ()
) -> list[Arguments]:
    """The method's candidates that follow from the scores of the first ones: all of a grid, or as many of it as the
    budget allows; of ranges the first third (at least two), then one more than there are scores. The same ones every
    time.

    Args:
        measure: which validation scores are better.
        scores: of the first candidates in their order; None: could not be trained.

    Raises:
        ConfigError: the grid holds fewer candidates than the budget, or Optuna is not installed.
    """
    if file.tuning is None:
        return [{}]
    require("optuna", "compare", "a comparison's 'tuning'")
    own = file.methods[file.compared[name][0]].tune if name in file.compared else {}
    axes = {**file.tuning.tune, **own}
    budget = file.tuning.budget
    grid = _grid(axes)
    if grid is None:
        return _proposed(axes, budget, measure, scores, derive_seed("tuning", name, str(split)) % 2**32)
    if len(grid) < budget:
        raise ConfigError(
            f"tuning: {name} has {len(grid)} candidates ({', '.join(axes)}) and the budget is {budget}; every method "
            "gets the same number, so give it more values, a range ({low: 0.001, high: 0.1}) or lower the budget"
        )
    return [grid[place] for place in _drawn(len(grid), budget)]


def _grid(axes: Axes) -> list[Arguments] | None:
    """None where an argument has a range."""
    lists = [values for values in axes.values() if not isinstance(values, Range)]
    if len(lists) < len(axes):
        return None
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*lists)]


def _drawn(count: int, budget: int) -> list[int]:
    """Places in a grid, in its order."""
    from optuna.distributions import IntDistribution
    from optuna.samplers import GridSampler

    study = _study(GridSampler({"place": list(range(count))}, seed=0), Measure())
    asked = (study.ask({"place": IntDistribution(0, count - 1)}) for _ in range(budget))
    return sorted(trial.params["place"] for trial in asked)


def _proposed(axes: Axes, budget: int, measure: Measure, scores: Sequence[float | None], seed: int) -> list[Arguments]:
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    begun = max(2, math.ceil(budget / 3))
    study = _study(TPESampler(n_startup_trials=begun, seed=seed), measure)
    spaces = {name: _space(axis) for name, axis in axes.items()}
    trials = [study.ask(spaces) for _ in range(begun)]
    for number, score in enumerate(scores):
        if score is None:
            study.tell(trials[number], state=TrialState.FAIL)
        else:
            study.tell(trials[number], score)
        if begun <= number + 1 < budget:
            trials.append(study.ask(spaces))
    return [{name: _value(axes[name], value) for name, value in trial.params.items()} for trial in trials]


def _study(sampler: "BaseSampler", measure: Measure) -> "Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler, direction="minimize" if measure.direction == "lower" else "maximize")


def _space(axis: Sequence[JsonValue] | Range) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(axis, Range):
        return CategoricalDistribution(range(len(axis)))  # a value may be a list, which Optuna does not take
    if axis.whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _value(axis: Sequence[JsonValue] | Range, proposed: float) -> JsonValue:
    if not isinstance(axis, Range):
        return axis[int(proposed)]
    if axis.whole:
        return int(proposed)
    return min(max(float(f"{proposed:.{DIGITS}g}"), axis.low), axis.high)


def judge(search: Search, read: Callable[[Run], SearchRun | None], measure: Measure) -> SearchResult:
    """What a search found.

    Args:
        measure: which validation scores are better.
        read: a run's result, None while it is not finished.
    """
    lines = []
    for entry, runs in zip(search.candidates, search.runs, strict=True):
        found = [read(run) for run in runs]
        scores = [None if each is None else each.score for each in found]
        reasons = [each.reason for each in found if each and each.reason]
        known = [score for score in scores if score is not None]
        lines.append(
            Candidate(
                values=entry.values,
                scores=scores,
                mean=float(np.mean(known)) if len(known) == len(scores) else None,
                reason=reasons[0] if reasons else None,
                finished=all(each is not None for each in found),
            )
        )
    judged = [place for place, line in enumerate(lines) if line.mean is not None]
    whole = all(line.finished for line in lines)
    chosen = min(judged, key=lambda place: measure.rank(lines[place].mean)) if whole and judged else None
    return SearchResult(method=search.name, split=search.split, candidates=lines, chosen=chosen)
