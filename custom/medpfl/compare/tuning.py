# SPDX-License-Identifier: Apache-2.0
"""A search of arguments with an equal budget: every method gets the same number of candidates, the references too.

A candidate is judged by the mean, over the tuning seeds, of the best round's mean validation score. These seeds take no
part in the final runs, and no test set is read. Where data are split several times, each split has a search of its own,
so that no case which tests in a split has a say in what is chosen for it.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from medpfl.compare.entries import Entry
from medpfl.compare.file import Arguments, Comparison
from medpfl.compare.results import Candidate, SearchResult
from medpfl.compare.run_results import SearchRun
from medpfl.compare.runs import Run
from medpfl.core.errors import ConfigError
from medpfl.tasks.metrics.measure import Measure


@dataclass(frozen=True)
class Search:
    """One method's candidates on one split, each with a run for every tuning seed."""

    name: str
    split: int | None
    candidates: list[Entry]
    runs: list[list[Run]]


def candidates_of(file: Comparison, name: str) -> list[Arguments]:
    """The method's candidates: its grid, or as many of it as the budget allows, drawn alike every time.

    Raises:
        ConfigError: the grid holds fewer candidates than the budget.
    """
    if file.tuning is None:
        return [{}]
    own = file.methods[file.compared[name][0]].tune if name in file.compared else {}
    axes = {**file.tuning.tune, **own}
    grid = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    budget = file.tuning.budget
    if len(grid) < budget:
        raise ConfigError(
            f"tuning: {name} has {len(grid)} candidates ({', '.join(axes)}) and the budget is {budget}; every method "
            "gets the same number, so give it more values or lower the budget"
        )
    return [grid[place] for place in sorted(random.Random(0).sample(range(len(grid)), budget))]


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
