# SPDX-License-Identifier: Apache-2.0
"""A report's curves and its settings."""

import html
import re
from pathlib import Path

import pytest
import yaml

from medpfl.results.report import curves, made, write_page
from medpfl.results.schema import ValidationLine
from summaries import result, summary

JOB = summary((result("anna", "local", 0.5, None), 0.5))


def lines(**scores: list[float]) -> list[ValidationLine]:
    return [
        ValidationLine(site=site, model=model, round=number + 1, metrics={"dice": value})
        for model, values in scores.items()
        for site in ("mean", "anna")
        for number, value in enumerate(values)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_models_with_equal_curves_are_named_together() -> None:
    drawn = curves(JOB, lines(**{"all_share": [0.3, 0.4]}, local=[0.1, 0.2], fedavg=[0.3, 0.4]))
    assert ">FedAvg, All share</text>" in drawn and ">Local</text>" in drawn
    apart = [*lines(fedavg=[0.3, 0.4], **{"all_share": [0.3, 0.4]})]
    apart[-1] = apart[-1].model_copy(update={"metrics": {"dice": 0.5}})  # at one hospital, in one round
    drawn = curves(JOB, apart)
    assert ">FedAvg</text>" in drawn and ">All share</text>" in drawn


def test_settings_are_readable_yaml(tmp_path: Path) -> None:
    found = JOB.model_copy(update={"components": {"model": "Mean <b>"}, "codecs": {"from_site": {"bits": 8}}})
    shown = yaml.safe_load(made(found))
    assert shown["slots"] == {"model": "Mean <b>"} and shown["codecs"] == {"from_site": {"bits": 8}}
    assert shown["settings"]["rounds"] == 1 and made(found).startswith("slots:\n  model: ")
    page = write_page(tmp_path, found, [], {}, []).read_text()
    (block,) = re.findall("<pre>(.*?)</pre>", page, re.DOTALL)
    assert "<b>" not in page and yaml.safe_load(html.unescape(block)) == shown
