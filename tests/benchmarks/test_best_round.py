# SPDX-License-Identifier: Apache-2.0
"""Rules that take a round, on rounds whose scores are known, and what it costs the run to score the test as well."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.best_round import BEST, LEAST_LOSS, RULES, _both_splits, deployed, table_of, trailing
from medpfl.results.files import read_lines
from medpfl.results.schema import ValidationLine
from medpfl.rounds.simulate import simulate
from small_jobs import small_job, write_table_sites

VALIDATION = [0.1, 0.9, 0.2, 0.6, 0.7, 0.6, 0.5]
TEST = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.45]
LOSS = [3.0, 2.0, 1.0, 1.5, 1.6, 1.7, 1.8]


def history(loss: bool) -> dict[str, object]:
    """Two hospitals whose scores are 0.05 above and below the mean, and a model that another run deploys."""
    lines = []
    for number, (seen, unseen, lost) in enumerate(zip(VALIDATION, TEST, LOSS, strict=True), 1):
        for site, off in ((0, 0.05), (1, -0.05)):
            scores = {"validation": {"auc": seen + off, "nll": lost if loss else None}, "test": {"auc": unseen - off}}
            lines.append({"model": "personal", "site": site, "round": number, **scores})
            lines.append({"model": "fedavg", "site": site, "round": number, "validation": {}, "test": {}})
    return {"score": "auc", "lines": lines}


def test_each_rule_takes_its_round() -> None:
    found = deployed("Auto", history(True))
    assert found["best round"] == 0.1  # a single good round
    assert found["best mean of three rounds"] == 0.5 and found["best mean of five"] == 0.5
    assert (found[LEAST_LOSS], found["last round"], found[BEST]) == (0.2, 0.45, 0.5)
    assert set(deployed("Auto", history(False))) == {*RULES, BEST} - {LEAST_LOSS}
    assert trailing(np.array([1.0, 2, 6]), 3).tolist() == [-np.inf, -np.inf, 3.0]


def test_the_table_compares_within_runs() -> None:
    one, two = ({**dict.fromkeys([*RULES, BEST], base), "last round": base + 0.25} for base in (0.25, 0.75))
    one[LEAST_LOSS] = two[LEAST_LOSS] = 0.5
    row = table_of({"found": {"none": {"Auto": [one, two]}}}).splitlines()[2]
    assert row.startswith("| nothing | 2 | 0.500 | +0.0000 (0.0000) |") and "| +0.2500 (0.0000) |" in row
    del two[LEAST_LOSS]  # of a single run there is no deviation
    assert " – | +0.2500" in table_of({"found": {"none": {"Auto": [one, two]}}}).splitlines()[2]


@pytest.mark.slow
def test_scoring_the_test_as_well_changes_nothing_of_the_run(tmp_path: Path) -> None:
    files, job = write_table_sites(tmp_path), small_job()

    def scores(folder: Path) -> list[ValidationLine]:
        simulate(job, files, folder / "results", folder / "home", test=False)
        return [line for line in read_lines(folder / "results") if isinstance(line, ValidationLine)]

    plain = scores(tmp_path / "plain")
    with _both_splits() as lines:
        watched = scores(tmp_path / "watched")
    assert plain == watched
    told = {(line.model, line.site, line.round): line.metrics["accuracy"] for line in plain if line.site != "mean"}
    kept = {(one["model"], sorted(files)[one["site"]], one["round"]): one["validation"]["accuracy"] for one in lines}
    assert told and {key: kept[key] for key in told} == told  # the last round's are not written where nothing is tested
    assert all(one["test"]["nll"] > 0 for one in lines)
    assert scores(tmp_path / "after") == plain and not lines[len(kept) :]
