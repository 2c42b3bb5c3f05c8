# SPDX-License-Identifier: Apache-2.0
"""What a report begins with: a plain sentence for each hospital on what joining brought."""

import html
import re
from pathlib import Path

import pytest

from medpfl.results.report import write_page
from medpfl.results.sentences import sentences
from medpfl.tasks.metrics.certainty import Certainty
from medpfl.tasks.metrics.measure import Measure
from summaries import result, summary, sure

DAYS = Measure(direction="lower", unit="days")


@pytest.mark.parametrize(
    ("model", "score", "local", "certainty", "sentence"),
    [
        ("personal", 0.62, 0.48, sure(0.5, 0.7, (0.02, 0.21)),
         "At anna, joining raised the test Dice from 0.48 to 0.62 on 8 test patients "
         "(95 % interval of the gain: 0.02 to 0.21)."),
        ("average", 0.62, 0.6, sure(0.5, 0.7, (-0.02, 0.07)),
         "At anna, joining raised the test Dice from 0.60 to 0.62 on 8 test patients, which these patients cannot tell "
         "from chance (95 % interval of the gain: -0.02 to 0.07)."),
        ("fedavg", 0.5, 0.6, sure(0.4, 0.6, (-0.2, -0.05)),
         "At anna, joining made the test Dice worse, from 0.60 to 0.50, on 8 test patients "
         "(95 % interval of the gain: -0.20 to -0.05)."),
        ("fedavg", 0.604, 0.601, sure(0.4, 0.6, (0.001, 0.2)),
         "At anna, joining raised the test Dice from 0.601 to 0.604 on 8 test patients "
         "(95 % interval of the gain: 0.001 to 0.200)."),
        ("fedavg", 0.62, 0.6, sure(0.5, 0.7, (-0.004, 0.04)),
         "At anna, joining raised the test Dice from 0.60 to 0.62 on 8 test patients, which these patients cannot tell "
         "from chance (95 % interval of the gain: -0.004 to 0.040)."),
        ("fedavg", 0.6, 0.6, None,
         "At anna, joining left the test Dice at 0.600 on 3 test samples (no interval is known)."),
        ("local", 0.55, 0.55, sure(0.4, 0.66),
         "anna kept its own model: its test Dice is 0.55 on 8 test patients (95 % interval: 0.40 to 0.66)."),
        ("personal", None, 0.48, None, "anna takes a model whose Dice is not defined on its test cases."),
        ("local", None, None, None, "anna kept its own model, whose Dice is not defined on its test cases."),
        ("personal", 0.5, None, sure(0.4, 0.6),
         "anna takes a model with a test Dice of 0.50 on 8 test patients; its own model has none."),
    ],
)  # fmt: skip
def test_one_sentence_says_what_joining_brought(
    model: str, score: float | None, local: float | None, certainty: Certainty | None, sentence: str
) -> None:
    assert sentences(summary((result("anna", model, score, certainty), local))) == [sentence]


def test_where_lower_is_better_less_is_a_gain_and_the_unit_is_said() -> None:
    better = (result("anna", "personal", 3.1, sure(2, 5, (0.4, 2.0)), "mae"), 4.2)
    worse = (result("berta", "personal", 4.2, sure(3, 6, (-2.0, -0.4)), "mae"), 3.1)
    first, second = sentences(summary(better, worse, measure=DAYS))
    assert first.startswith("At anna, joining lowered the test MAE (lower is better) from 4.20 to 3.10 days on 8 test")
    assert second.startswith("At berta, joining made the test MAE (lower is better) worse, from 3.10 to 4.20 days, on")


def test_a_metric_of_a_class_bears_its_name() -> None:
    measure = Measure(class_number=1)
    (said,) = sentences(summary((result("anna", "personal", 0.6, None, "dice_1"), 0.5), measure=measure))
    assert "the test Dice of liver from 0.50 to 0.60" in said


def test_a_hospital_without_a_choice_is_not_left_out() -> None:
    found = summary((result("anna", "personal", 0.6, None), 0.5), also="berta")
    assert sentences(found)[1] == "berta has no test result here."
    kept_here = found.model_copy(update={"test": [*found.test, result("berta", "personal", 0.5, None)]})
    assert sentences(kept_here)[1] == "berta did not say which model it takes."


def test_nothing_is_said_where_nothing_was_chosen() -> None:
    assert sentences(summary((result("anna", "local", 0.6, None), 0.6)).model_copy(update={"chosen": {}})) == []


def test_the_page_begins_with_them_and_shows_names_as_they_are(tmp_path: Path) -> None:
    found = summary((result("<b>anna", "personal", 0.62, sure(0.5, 0.7, (0.02, 0.21))), 0.48))
    page = write_page(tmp_path, found, [], {}, []).read_text()
    text = html.unescape(re.sub("<[^>]*>", "", page))
    assert "<b>" not in page and sentences(found)[0] in text
    assert text.index("At <b>anna, joining raised") < text.index("hospital by hospital")
