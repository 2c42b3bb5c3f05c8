# SPDX-License-Identifier: Apache-2.0
"""A metric whose unit makes it small (an error of 0.004 mmol/L): no table and no sentence rounds it to nothing."""

from pathlib import Path

from rich.console import Console

from medpfl.deployed.card import card
from medpfl.deployed.model_file import Chosen, History, ModelMeta, Recipe
from medpfl.results.chosen import chosen_table, interval_table, power_notes
from medpfl.results.files import write_json
from medpfl.results.glossary import WORDS
from medpfl.results.report import write_page
from medpfl.results.schema import TrainingSummary
from medpfl.results.sentences import sentences
from medpfl.results.tables import metric_means, result_table
from medpfl.results.terminal_table import print_results
from medpfl.tasks.metrics.certainty import Certainty
from medpfl.tasks.metrics.measure import Measure
from summaries import result, summary

MMOL = Measure(direction="lower", unit="mmol/L")
SURE = Certainty(patients=30, interval=(0.0035, 0.0049), gain=0.00033, gained=(-0.0001, 0.0007))
SMALL = summary((result("anna", "personal", 0.00412, SURE, "mae"), 0.00446), measure=MMOL)


def test_the_tables_tell_close_models_apart() -> None:
    both = SMALL.model_copy(update={"test": [*SMALL.test, result("anna", "personal", 0.00412, SURE, "mae")]})
    table = result_table(both)
    assert table.texts(table.values[0]) == table.mean_texts == ["0.00446", "0.00412"]
    assert table.gain_texts() == ["", "+0.00034 [-0.0001, 0.0007]"]
    assert chosen_table(both)[1] == [["anna", "Personal", "0.0041 [0.0035, 0.0049]", "+0.0003 [-0.0001, 0.0007]", "30"]]
    assert interval_table(both, table)[1][1] == [
        "Personal", "0.0041 [0.0035, 0.0049] mmol/L, gain +0.0003 [-0.0001, 0.0007]",
    ]  # fmt: skip
    assert power_notes(both)[0].startswith("anna: a difference of 0.0003 would show on about ")


def test_the_sentence_says_from_what_to_what() -> None:
    (said,) = sentences(SMALL)
    assert "lowered the test MAE (lower is better) from 0.0045 to 0.0041 mmol/L on 30 test patients, which" in said
    assert said.endswith("(95 % interval of the gain: -0.0001 to 0.0007).")
    (said,) = sentences(summary((result("anna", "local", 0.00412, SURE, "mae"), 0.00412), measure=MMOL))
    assert "is 0.0041 mmol/L on 30 test patients (95 % interval: 0.0035 to 0.0049)" in said
    (said,) = sentences(summary((result("anna", "personal", 512345.0, None, "mae"), 523456.0), measure=MMOL))
    assert "from 523456 to 512345 mmol/L" in said


def test_each_metric_has_decimals_of_its_own(tmp_path: Path) -> None:
    """The root of an error in mmol/L is small, and the share of the variance is not."""
    mixed = [line.model_copy(update={"metrics": {**line.metrics, "r2": 0.84}}) for line in SMALL.test]
    both: TrainingSummary = SMALL.model_copy(update={"test": mixed})
    assert metric_means(both)[1] == [["Local", "0.00446", "0.840"]]
    write_json(tmp_path / "summary.json", both)
    with (tmp_path / "told.txt").open("w") as file:
        print_results(tmp_path, Console(file=file, width=120))
    assert "0.00446" in (tmp_path / "told.txt").read_text()


def test_the_card_says_its_results_and_how_it_was_chosen() -> None:
    found = Chosen(
        model="personal", patients=30, gain=0.00033, error=0.00012, interval=(0.0001, 0.0006), best="personal",
        needed=1.64, candidates={"local": 0.00446, "personal": 0.00412},
    )  # fmt: skip
    history = History(
        job="sugar", site="anna", model="personal", choice="best", round=1, cases={"train": 9, "test": 30},
        samples_by_class={}, test={"mae": 0.00412, "r2": 0.84}, calibration=None, threshold=None, score="mae",
        certainty=SURE, chosen=found, preparation={},
    )  # fmt: skip
    recipe = Recipe(
        method={"path": "x"}, task={"path": "y"}, deployed="personal", classes=[], input_shape=[4], hospitals=3,
        networks=["model"],
    )  # fmt: skip
    meta = ModelMeta(recipe=recipe, history=history, parameters=5, versions={"MedPFL": "0"})
    told = card(meta, "personal-best.safetensors", {"mae": MMOL})
    assert "| mae | 0.004120 mmol/L, lower is better |" in told and "| r2 | 0.8400 |" in told
    assert "Mae 0.0041 [0.0035, 0.0049] mmol/L, gain +0.0003 [-0.0001, 0.0007] on 30 test patients." in told
    assert "gains +0.000330 [0.0001, 0.0006] over" in told and "(of 0.000120)" in told
    assert "| personal | 0.004120 mmol/L |" in told


def test_the_average_of_models_that_predict_numbers_is_not_one_of_probabilities(tmp_path: Path) -> None:
    page = write_page(tmp_path, SMALL, [], {}, []).read_text()
    assert "numbers that they predict" in WORDS["average"] and "models' probabilities" not in page
