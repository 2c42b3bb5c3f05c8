# SPDX-License-Identifier: Apache-2.0
"""A comparison by a metric of which lower values are better: ranking, marks, gains, targets, choices."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from pydantic import TypeAdapter

from medpfl.compare import aggregate, comparison_tables
from medpfl.compare.arranging import collapsed
from medpfl.compare.entries import Entry
from medpfl.compare.fold_table import collect, frequencies, scores
from medpfl.compare.report import _losses, _shades, _top, write_report
from medpfl.compare.results import HospitalRow, Results, Stat, UnseenRow
from medpfl.compare.run_results import FoldRun, Initial, Point, SearchRun, Served, ServedBySuper
from medpfl.compare.runs import Run
from medpfl.compare.tuning import Search, judge
from medpfl.results.compact import read_compact
from medpfl.tasks.metrics.measure import Measure

STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "compare-label-skew-sgd.json.xz"
MORE, LESS = Measure(), Measure(direction="lower", unit="days")


def stat(mean: float) -> Stat:
    return Stat(mean=mean, sd=None, values=[mean])


@pytest.fixture(scope="module")
def stored() -> Callable[[Measure | None], Results]:
    """A published comparison, as if its score were such a metric (None: as it was published)."""
    content = TypeAdapter(Results).validate_json(json.dumps(read_compact(STORED)))
    names = [row.name for row in content.rows]
    unseen = [
        UnseenRow(name=name, mean=stat(mean), hospitals={}) for name, mean in zip(names, (9.5, 10.5), strict=False)
    ]

    def of(measure: Measure | None) -> Results:
        metrics = {} if measure is None else {content.score: measure}
        return content.model_copy(update={"metrics": metrics, "unseen": unseen})

    return of


def test_published_files_say_nothing_and_higher_is_better(stored: Callable[[Measure | None], Results]) -> None:
    assert stored(None).measure == MORE
    assert comparison_tables.ranked(stored(None)) == comparison_tables.ranked(stored(MORE))


def test_the_best_stands_first(stored: Callable[[Measure | None], Results]) -> None:
    means = [row.best.mean for row in comparison_tables.ranked(stored(LESS))]
    assert means == sorted(means, key=float) and means[0] < means[-1]
    assert [line[1] for line in comparison_tables.unseen(stored(LESS))[1]][:2] == ["9.500", "10.500"]
    more = [line[1] for line in comparison_tables.unseen(stored(MORE))[1]]
    assert more[:2] == ["10.500", "9.500"]  # by number, not by text


@pytest.mark.slow
def test_what_is_marked_is_the_best(stored: Callable[[Measure | None], Results], tmp_path: Path) -> None:
    rows = stored(LESS).rows
    site = stored(LESS).hospitals[0]
    each = [cast(float, row.hospitals[site].best.mean) for row in rows]
    assert _top(rows, LESS)[site] == min(each) < max(each) == _top(rows, MORE)[site]
    assert _shades([[1.0, 3.0, None]], LESS, 3) == [[("1.000", 0.66), ("3.000", 0.06), ("n/a", 0.0)]]
    assert _shades([[1.0, 3.0, None]], MORE, 3) == [[("1.000", 0.06), ("3.000", 0.66), ("n/a", 0.0)]]
    page = write_report(stored(LESS), tmp_path).read_text()
    score = stored(LESS).score.replace("_", " ")
    plain = re.sub(r"<[^>]+>", "", page)  # words are links to the glossary
    assert f"Leaderboard: test {score} (days, lower is better)" in plain
    told = "minus the method's: above zero, joining was better"
    assert told in plain and told not in re.sub(r"<[^>]+>", "", write_report(stored(MORE), tmp_path).read_text())


def test_the_unit_is_in_every_heading(stored: Callable[[Measure | None], Results]) -> None:
    content = stored(LESS)
    label = f"{content.score.replace('_', ' ')} (days, lower is better)"
    assert label in comparison_tables.metrics(content)[0] and label in comparison_tables.together(content)[0]
    assert f"Test {label}, mean" in comparison_tables.markdown(content)


def test_headings_do_not_say_below_where_that_is_better(stored: Callable[[Measure | None], Results]) -> None:
    for measure, worse, validated in (
        (MORE, "surely below Local", "mean validation score"),
        (LESS, "surely worse than Local", "mean validation score (days, lower is better)"),
    ):
        assert comparison_tables.chosen(stored(measure))[0][3] == worse
        assert comparison_tables.searches(stored(measure))[0][2] == validated


def test_without_an_interval_it_is_not_known_who_is_surely_worse_off(
    stored: Callable[[Measure | None], Results],
) -> None:
    """As where a run of a split is missing: "none" would say that nobody is."""
    content = stored(LESS)
    told = [line[3] for line in comparison_tables.chosen(content)[1]]
    assert told and "not known" not in told
    rows = [
        row.model_copy(
            update={
                "hospitals": {s: gain.model_copy(update={"interval": None}) for s, gain in row.hospitals.items()},
                "below": [],
            }
        )
        for row in content.chosen
    ]
    without = comparison_tables.chosen(content.model_copy(update={"chosen": rows}))[1]
    assert [line[3] for line in without] == ["not known"] * len(rows)


@pytest.mark.slow
def test_the_page_says_after_what_models_were_scored(
    stored: Callable[[Measure | None], Results], tmp_path: Path
) -> None:
    """results.md did, and the page, with which one begins, did not; its curves were all said to be after mixing."""
    content = stored(LESS)
    for after in ("local steps", None):
        rows = [row.model_copy(update={"scored": after}) for row in content.rows]
        page = write_report(content.model_copy(update={"rows": rows}), tmp_path).read_text()
        shown = len(collapsed(rows)[0])
        assert page.count("<td>local steps</td>") == (4 * shown if after else 0)  # in each of four orders
        assert ("<th>scored after</th>" in page) == bool(after)
        assert "as they came out of each round" not in page


def test_less_is_a_gain_and_more_a_loss() -> None:
    mine, alone = np.array([2.0, 2.5]), np.array([3.0, 3.0])
    found, other = (aggregate.gain(mine, alone, np.array([True, True]), measure) for measure in (LESS, MORE))
    assert found and other and (found.mean, found.wins, found.losses) == (0.75, 2, 0)
    assert (other.mean, other.wins, other.losses) == (-0.75, 0, 2)
    row = SimpleNamespace(name="m", gain=found, hospitals={"anna": SimpleNamespace(gain=found)})
    assert _losses([cast(Any, row)], ["anna"]) == {"m": 0}


def test_the_worst_off_hospital_has_the_largest_error() -> None:
    hospitals = {
        site: HospitalRow(best=stat(mean), last=stat(mean), gain=None) for site, mean in (("a", 1.0), ("b", 2.0))
    }
    for measure, site in ((LESS, "b"), (MORE, "a")):
        found = aggregate.worst(hospitals, measure)
        assert found and found.hospital == site


def test_a_target_is_reached_from_above() -> None:
    found = aggregate.reach([[5.0, 3.0, 2.0], [5.0, 4.0, 3.5]], 3.0, 10, 1.0, LESS)
    assert found and found.rounds == [2, None] and found.bytes_per_hospital == 20


def test_a_search_takes_the_candidate_with_the_lowest_score() -> None:
    runs = [[cast(Run, SimpleNamespace(score=score))] for score in (3.0, 1.0, 2.0, 1.0)]
    entries = [cast(Entry, SimpleNamespace(values={"lr": place})) for place in range(4)]

    def read(run: Run) -> SearchRun:
        score = cast(Any, run).score
        start = Initial(digest="d", same=[], own=[])
        return SearchRun(seed=0, split=None, without=None, method="m", initial=start, score=score, reason=None)

    search = Search("m", None, entries, runs)
    assert judge(search, read, LESS).chosen == 1 and judge(search, read, MORE).chosen == 0


def test_the_best_of_a_fold_is_the_lowest() -> None:
    points = [Point(gamma=gamma, score=score, counts=[1]) for gamma, score in ((0.0, 4.0), (1.0, 2.0))]
    rows = {
        "local": Served(models={"b": 4.0, "c": 2.0}, score=3.0, best=2.0),
        "super": ServedBySuper(score=4.0, best=4.0, gamma=0.0, served={"global": 1}, cases=1, points=points),
    }
    run = FoldRun(without="a", seed=0, score="mae", measure=LESS, cases=1, rows=rows, events=[])
    content = collect([run])
    assert content.measure == LESS and scores(content)[1][0][1] == "3.000 (best 2.000)"
    told = frequencies(content)
    assert told and told[1][0][-1] == "2.000"
