# SPDX-License-Identifier: Apache-2.0
"""A job with several metrics: the score first, then the others, with directions, units and the classes' names; and what
is said of a model that gives every case the same class."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from medpfl.core.mixers import Mean
from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.results.files import read_training, write_json
from medpfl.results.report import write_page
from medpfl.results.schema import ControllerArguments, FinalLine, TrainingSummary
from medpfl.results.tables import metric_means
from medpfl.results.terminal_table import print_results
from medpfl.tasks import Segmentation, Tabular
from medpfl.tasks.metrics.constant import most_frequent, one_answer
from tools import run

TASK = Segmentation("organ", more_metrics=("hd95_2",))
VALUES = {("local", "anna"): (0.5, 9.0), ("local", "berta"): (0.7, 3.0), ("personal", "anna"): (0.6, 4.0)}


def summary() -> TrainingSummary:
    test = [
        FinalLine(site=site, model=model, round=1, metrics={"hd95_2": distance, "dice": dice}, choice="best")
        for (model, site), (dice, distance) in VALUES.items()
    ]
    return TrainingSummary(
        classes=["background", "liver", "tumour"], metrics=TASK.measures,
        sizes={site: {"train": 4, "validation": 2, "test": 2} for site in ("anna", "berta")},
        versions={}, components={}, settings=ControllerArguments(rounds=1, seed=0), recipe=None,
        personalised="personal", score="dice", codecs=None, job="organ", medpfl="0", written="",
        roster=["anna", "berta"], best={}, slots={},
        test=test, events=[],
    )  # fmt: skip


HEADLINE = ["model", "dice", "hd95 of tumour (mm, lower is better)"]


def test_the_score_stands_first() -> None:
    head, rows = metric_means(summary())
    of_one = ["0.600 (1 of 2 hospitals)", "4.000 (1 of 2 hospitals)"]
    assert head == HEADLINE and rows == [["Local", "0.600", "6.000"], ["Personal", *of_one]]
    alone = summary().model_copy(update={"test": [
        line.model_copy(update={"metrics": {"dice": 0.5}}) for line in summary().test
    ]})  # fmt: skip
    assert metric_means(alone) == ([], [])


def test_the_console_and_the_page_show_all(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", summary())
    assert read_training(tmp_path).metrics == TASK.measures
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    print_results(tmp_path, console)
    text = console.export_text()
    assert text.index("test dice") < text.index("all metrics, mean of the hospitals") < text.index(HEADLINE[2])
    page = write_page(tmp_path, summary(), [], {}, []).read_text()
    assert "<tr><td>Local</td><td>0.600</td><td>6.000</td></tr>" in page
    assert f"Hospital by hospital: {HEADLINE[2]}</summary>" in page
    assert '<td>9.000</td><td class="win">4.000</td>' in page  # a distance: the lower one


def test_what_a_model_that_learnt_nothing_scores() -> None:
    assert most_frequent([30, 10]) == {"accuracy": 0.75, "balanced_accuracy": 0.5, "auc": 0.5}
    assert most_frequent([0, 5, 5])["balanced_accuracy"] == 0.5
    truth = torch.tensor([0, 0, 0, 1])
    decisions = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.7, 0.3]])
    samples = Samples(torch.zeros(4, 1), truth, np.arange(4), list("abcd"))
    found = Tabular("blood").evaluate(decisions, samples)
    assert found.metrics["accuracy"] == most_frequent([3, 1])["accuracy"] and found.one_answer
    other = decisions.clone()
    other[3] = torch.tensor([0.2, 0.8])
    assert not one_answer(other, samples, Target.CLASS) and not one_answer(decisions, samples, Target.LABELS)
    alike = replace(samples, targets=torch.zeros(4, dtype=torch.int64))
    assert not one_answer(decisions, alike, Target.CLASS)  # there is nothing else to answer


@pytest.mark.slow
def test_a_card_says_that_a_model_gives_every_case_the_same_class(
    tmp_path: Path, make_job: Callable[..., Job], table_sites: dict[str, Path]
) -> None:
    """At the first hospital all rows are alike, so whatever the network learns, its answers are."""
    table = table_sites["anna"].with_suffix(".csv")
    head, *lines = table.read_text().splitlines()
    table.write_text("\n".join([head, *(f"0,0,0,{line[-1]}" for line in lines)]) + "\n")
    method = FedAvg(lr=0.05, epochs=3)
    run(make_job(rounds=2, mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    cards = {
        site: next((tmp_path / "home").glob(f"{site}/*/models/fedavg-best.md")).read_text() for site in table_sites
    }
    words = "It gave all of these cases the same class"
    assert words in cards["anna"] and not all(words in card for card in cards.values())
    assert all("| for comparison: accuracy of always answering " in card for card in cards.values())
    model = next((tmp_path / "home").glob("anna/*/models/fedavg-best.safetensors"))
    assert load_deployed(model).meta.history.one_answer  # type: ignore[union-attr]
