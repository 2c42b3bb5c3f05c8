# SPDX-License-Identifier: Apache-2.0
"""A job's tables where lower values are better, with a unit: what is marked, what is a gain, what the headings say."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from rich.console import Console

from medpfl.data.samples import Samples
from medpfl.results.files import read_summary, write_json
from medpfl.results.report import write_page
from medpfl.results.schema import ControllerArguments, FinalLine, Traffic, TrainingSummary, ValidationLine
from medpfl.results.tables import ResultTable, result_table
from medpfl.results.terminal_table import print_results
from medpfl.tasks.metrics.certainty import certainty_of
from medpfl.tasks.metrics.masks import Dice
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import sheet_of_cases

DAYS = {"mae": Measure(direction="lower", unit="days")}
FOUND = {"local": {"anna": 3.0, "berta": 5.0}, "fedavg": {"anna": 4.0, "berta": 2.0}}


def summary(metrics: dict[str, Measure]) -> TrainingSummary:
    sites = ["anna", "berta"]
    tested = [
        FinalLine(site=site, model=model, round=1, metrics={"mae": value}, choice="best")
        for model, values in FOUND.items()
        for site, value in values.items()
    ]
    return TrainingSummary(
        classes=[], metrics=metrics, sizes={site: {"train": 9} for site in sites}, versions={}, components={},
        settings=ControllerArguments(rounds=1, seed=0), recipe=None, personalised="fedavg", score="mae", codecs=None,
        job="stay", medpfl="1", written="now", roster=sites, best={}, slots={}, test=tested, events=[],
    )  # fmt: skip


def test_the_lowest_is_the_best_of_a_row_and_less_is_a_gain() -> None:
    table = result_table(summary(DAYS))
    assert table.models == ["local", "fedavg"]
    assert [table.best(row) for row in range(2)] == [3.0, 2.0]
    assert table.gains() == [None, 1.0]  # 4 days alone, 3 together
    assert table.score == "mae (days, lower is better)"


def test_a_gain_is_of_the_hospitals_that_have_both() -> None:
    """A model that broke where local training is bad looked better than it: the means were of other hospitals."""
    values = np.array([[3.0, 4.0], [9.0, np.nan], [5.0, 5.0]])
    table = replace(result_table(summary(DAYS)), sites=["anna", "berta", "clara"], sizes=[9, 9, 9], values=values)
    assert table.gains() == [None, -0.5]  # of anna and clara; Local's mean of all three is 17 / 3 days
    assert table.mean_texts == ["5.667", "4.500 (2 of 3 hospitals)"]
    alone = replace(table, values=np.array([[3.0, np.nan], [np.nan, 4.0], [np.nan, np.nan]]))
    assert alone.gain_texts() == ["", "n/a"]


def test_a_file_that_does_not_say_it_is_of_a_metric_of_which_more_is_better() -> None:
    table = result_table(summary({}))
    assert [table.best(row) for row in range(2)] == [4.0, 5.0] and table.gains() == [None, -1.0]
    assert table.score == "mae"


@pytest.mark.parametrize("lacks", [None, "left out"])
def test_a_gain_is_that_of_the_hospitals_that_have_both_scores(lacks: str | None) -> None:
    """A hospital whose models broke, or that missed the best round, has Local's score alone."""
    whole = summary(DAYS)
    tested = [
        line.model_copy(update={"metrics": {"mae": None}}) if (line.site, line.model) == ("berta", "fedavg") else line
        for line in whole.test
    ]
    tested = [line for line in tested if lacks is None or line.metrics["mae"] is not None]
    table = result_table(whole.model_copy(update={"test": tested}))
    assert table.mean.tolist() == [4.0, 4.0]
    assert table.gains() == [None, -1.0]  # Anna's: 3 days alone, 4 together
    assert table.gain_texts() == ["", "-1.000 (1 of 2 hospitals)"]
    nobody = [line for line in tested if line.site == "anna" or line.model == "local"]
    nobody = [line for line in nobody if (line.site, line.model) != ("anna", "local")]
    assert result_table(whole.model_copy(update={"test": nobody})).gain_texts() == ["", "n/a"]


def test_the_console_marks_the_lowest(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", summary(DAYS))
    assert read_summary(tmp_path).metrics == DAYS
    console = Console(record=True, force_terminal=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    print_results(tmp_path, console)
    text = console.export_text(styles=True)
    assert "test mae (days, lower is better)" in text
    assert "\x1b[1m3.000" in text and "\x1b[1m2.000" in text and "\x1b[1m5.000" not in text


def test_the_console_says_what_is_not_defined(tmp_path: Path) -> None:
    whole = summary(DAYS)
    tested = [
        line.model_copy(update={"metrics": {"mae": None}}) if line.site == "anna" else line for line in whole.test
    ]
    write_json(tmp_path / "summary.json", whole.model_copy(update={"test": tested}))
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    print_results(tmp_path, console)
    text = console.export_text()
    assert "nan" not in text and text.count("n/a") == 2 and "5.000 (1 of 2 hospitals)" in text


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_page_shades_the_lowest_and_says_the_unit(tmp_path: Path) -> None:
    lines = [ValidationLine(site=site, model="local", round=1, metrics={"mae": 3.0}) for site in ("mean", "anna")]
    sent = [
        Traffic(round=1, site="anna", direction="from_site", raw=n, encoded=n // 2, ratio=2.0) for n in (10**6, 10**7)
    ]
    page = write_page(tmp_path, summary(DAYS), lines, {"model/00001": np.eye(2)}, sent).read_text()
    assert "<tr><td>anna</td><td>0</td><td>0</td><td>11</td><td>5.5</td></tr>" in page  # MB of all rounds
    assert '<td class="win">3.000</td><td>4.000</td>' in page and '<td>5.000</td><td class="win">2.000</td>' in page
    assert "<td>gain over local</td><td></td><td></td><td>+1.000</td>" in page
    assert "Test mae (days, lower is better), hospital by hospital" in page
    assert ">mae (days, lower is better)</text>" in page  # the curves' axis


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_no_gain_has_no_sign(direction: Literal["higher", "lower"]) -> None:
    """What one hospital of 24 patients wins and the other loses, and models that answer alike: in reports and CSV files
    the one was "-0.000" or 5.6e-17, and the interval of the other "[0.00, -0.00]" where lower values are better."""
    measure = Measure(direction=direction)
    for sign in (1, -1):
        values = np.array([[22 / 24, (22 + sign) / 24], [22 / 24, (22 - sign) / 24]])
        models = ["local", "fedavg"]
        table = ResultTable("accuracy", models, models, ["anna", "berta"], [9, 9], values, measure)
        assert table.gains() == [None, 0.0] and table.gain_texts() == ["", "+0.000"]
        assert replace(table, values=values[:1]).gains() == [None, pytest.approx(measure.gain(sign / 24, 0))]
    targets = torch.zeros(8)
    cases = Samples(targets[:, None], targets, np.arange(8), [str(number) for number in range(8)])
    alike = sheet_of_cases(Dice(), np.linspace(0, 1, 8).tolist(), cases)
    found = certainty_of(alike, alike, measure, 1, 0)
    assert found is not None and found.short(0.5, measure).endswith("gain +0.00 [0.00, 0.00]")
