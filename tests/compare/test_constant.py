# SPDX-License-Identifier: Apache-2.0
"""A model that always answers the most frequent class leads tables by accuracy: its row, what stands beside the score,
and a sentence for methods that end there."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from comparing import compared
from medpfl.compare import comparison_tables
from medpfl.compare.constant import ALWAYS, always, beside, warnings
from medpfl.compare.report import write_report
from medpfl.compare.results import Results, Row, Stat
from medpfl.results.compact import read_compact
from medpfl.results.files import parse
from small_jobs import write_table_sites

STORED = Path(__file__).resolve().parents[2] / "docs" / "results"


def stored(name: str) -> Results:
    file = STORED / f"compare-{name}.json.xz"
    return parse(TypeAdapter(Results), json.dumps(read_compact(file)), file)


@pytest.fixture(scope="module")
def heart() -> Results:
    return stored("heart")


def test_the_row_of_who_learnt_nothing(heart: Results) -> None:
    counts = {site: list(found.values()) for site, found in heart.splits[0].labels.items()}
    shares = [max(one) / sum(one) for one in counts.values()]
    head, rows = comparison_tables.leaderboard(heart)
    assert head[:4] == ["method", "best round", "balanced accuracy", "auc"]
    assert rows[-1][:4] == [ALWAYS, f"{np.mean(shares):.3f}", "0.500", "0.500"]
    assert rows[-1][head.index("worst-off hospital")] == f"{heart.hospitals[int(np.argmin(shares))]} {min(shares):.3f}"
    assert comparison_tables.hospitals(heart)[1][-1] == [ALWAYS, *(f"{share:.3f}" for share in shares)]
    local = next(row for row in heart.rows if row.name == "Local")
    mean = comparison_tables.score_text(local.metrics["balanced_accuracy"], 3)
    assert mean in next(row for row in rows if row[0] == "Local")


@pytest.mark.parametrize("name", ["phantom", "skin"])
def test_none_where_it_cannot_lead(name: str) -> None:
    """By Dice, and by balanced accuracy."""
    content = stored(name)
    assert beside(content) == [] and always(content) == {}
    headings = comparison_tables.leaderboard(content)[0]
    assert len(set(headings) - {"scored after"}) == 5 and ALWAYS not in comparison_tables.markdown(content)


def test_none_where_samples_have_several_labels(heart: Results) -> None:
    split = heart.splits[0]
    twice = {site: {name: 2 * count for name, count in found.items()} for site, found in split.labels.items()}
    assert always(heart.model_copy(update={"splits": [split.model_copy(update={"labels": twice})]})) == {}


def test_a_metric_that_the_leader_lacks_is_in_the_tables(heart: Results) -> None:
    """FedSM's super model is tested by fewer metrics than the others; where it led, these were in no table."""
    first, *others = comparison_tables.ranked(heart)
    less = first.model_copy(update={"metrics": {name: one for name, one in first.metrics.items() if name != "auc"}})
    content = heart.model_copy(update={"rows": [less, *others]})
    head, rows = comparison_tables.metrics(content)
    assert head == comparison_tables.metrics(heart)[0] and rows[0][head.index("auc")] == "n/a"
    told = [line[head.index("auc")] for line in rows[1:]]
    assert told == [comparison_tables.score_text(row.metrics["auc"], 3) for row in others]
    assert "Hospital by hospital: auc" in comparison_tables.markdown(content)


def test_a_metric_that_is_not_defined_somewhere_is_named(heart: Results) -> None:
    """The score is, but beside it stood AUC as the mean of three of four hospitals, without a word."""
    site = heart.hospitals[0]

    def without(row: Row) -> Row:
        auc = row.metrics["auc"]
        none = Stat(mean=None, sd=None, values=[None] * len(row.pairs))
        changed = auc.model_copy(update={"hospitals": {**auc.hospitals, site: none}})
        return row.model_copy(update={"metrics": {**row.metrics, "auc": changed}, "one_answer": {}})

    content = heart.model_copy(update={"rows": [without(row) for row in heart.rows]})
    words = f"No model has auc at {site}: means over the hospitals are those of the others."
    assert warnings(content) == [words] and words in comparison_tables.markdown(content)


@pytest.mark.slow
def test_a_method_that_ends_there_is_named(heart: Results, tmp_path: Path) -> None:
    assert "Local gives all test cases the same class: switzerland in 7 of 10 runs." in warnings(heart)
    none = heart.model_copy(update={"rows": [row.model_copy(update={"one_answer": {}}) for row in heart.rows]})
    rows = [row.model_copy(update={"one_answer": {"hungary": 3}}) if row.name == "FedAMP" else row for row in none.rows]
    content = none.model_copy(update={"rows": rows})
    words = "FedAMP gives all test cases the same class: hungary in 3 of 10 runs."
    assert warnings(none) == [] and warnings(content) == [words]
    assert words in comparison_tables.markdown(content) and words not in comparison_tables.markdown(none)
    page = write_report(content, tmp_path).read_text()
    assert f'<p class="warn">{words}</p>' in page and f'<td class="ref">{ALWAYS}</td>' in page


@pytest.mark.slow
def test_a_comparison_finds_them(tmp_path: Path) -> None:
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    table = sites["anna"].with_suffix(".csv")
    head, *lines = table.read_text().splitlines()
    table.write_text("\n".join([head, *(f"0,0,0,{line[-1]}" for line in lines)]) + "\n")  # nothing tells them apart
    _, content = compared(tmp_path, sites, methods={})
    assert all("anna" in row.one_answer for row in content.rows)
    assert len(warnings(content)) == len(content.rows) and comparison_tables.leaderboard(content)[1][-1][0] == ALWAYS
