# SPDX-License-Identifier: Apache-2.0
"""What console and report say of the models that hospitals chose, and how sure scores are."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import norm, t

from medpfl.job import Job
from medpfl.results.chosen import chosen_table, interval_table, paid, patients_needed, power_notes
from medpfl.results.files import read_training, write_json
from medpfl.results.line import FinalLine
from medpfl.results.report import write_report
from medpfl.results.schema import TrainingSummary
from medpfl.results.sentences import sentences
from medpfl.results.tables import mean_band, result_table
from medpfl.results.terminal_table import print_results
from medpfl.tasks.metrics.certainty import Certainty, error_of, interval_of, interval_text
from medpfl.tasks.metrics.measure import Measure
from summaries import result, summary, sure
from tools import run

Make = Callable[..., Job]
SURE = {"patients": 8, "interval": [0.55, 0.68], "gain": 0.14, "gained": [0.06, 0.21]}


def row(site: str, model: str, **certainty: Any) -> dict[str, Any]:
    test = {"site": site, "model": model, "split": "test", "round": 3, "metrics": {"accuracy": 0.62}, "choice": "best"}
    return {"test": {**test, **({"certainty": {**SURE, **certainty}} if certainty else {})}, "gain": 0.1}


def changed(summary: TrainingSummary, **chosen: dict[str, Any]) -> TrainingSummary:
    return TrainingSummary.model_validate_json(json.dumps({**summary.model_dump(mode="json"), "chosen": chosen}))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_jobs import small_job, write_table_sites

    folder = tmp_path_factory.mktemp("chosen")
    run(small_job(rounds=3), write_table_sites(folder / "sites", rows=60), folder)
    return folder / "results"


@pytest.mark.slow
def test_the_console_and_the_report_say_what_was_chosen(done: Path) -> None:
    summary = changed(
        read_training(done),
        anna=row("anna", "personal", gain=0.14),
        berta=row("berta", "local"),
        clara=row("clara", "average", gain=-0.02, gained=[-0.06, 0.02]),
    )
    write_json(done / "summary.json", summary)
    console = Console(width=300, file=io.StringIO(), record=True)
    print_results(done, console)
    page = write_report(done).read_text()
    for text in (console.export_text(clear=False), " ".join(page.split())):
        for cell in ("Personal", "0.62 [0.55, 0.68]", "+0.14 [0.06, 0.21]", "-0.02 [-0.06, 0.02]", "Average"):
            assert cell in text, cell
        assert "2 of 3 hospitals take another model than the one trained there alone, which their" in text
        assert "at 1 of them and surely below zero at 0" in text
        assert "clara: a difference of 0.02 would show on about 45 test patients; it has 8." in text
    tiny = changed(summary, clara=row("clara", "average", gain=-0.0004, gained=[-0.06, 0.06]))
    assert power_notes(summary) and not power_notes(tiny)  # "a difference of 0.00 would show on 153,000 patients"
    head, lines = chosen_table(summary)
    assert head[1] == "chosen" and [line[:2] for line in lines][2] == ["clara", "Average"]
    table = result_table(summary)
    low, high = next(band for band in table.bands if band and band[0] < band[1])
    shown = f"[{low:.2f}, {high:.2f}]"
    assert table.bands[0] is None and shown in console.export_text(clear=False) and shown in page
    head, lines = interval_table(summary, table)
    assert head[1] == "anna (12 test patients)" and {len(line) for line in lines} == {5}
    assert "gain" in lines[1][1] and "gain" not in lines[0][1]  # the local model is the first


def test_of_files_of_before_nothing_is_said(done: Path) -> None:
    content = read_training(done).model_dump(mode="json")
    content.pop("chosen", None)
    for line in content["test"]:
        line.pop("certainty", None)
    summary = TrainingSummary.model_validate_json(json.dumps(content))
    assert chosen_table(summary) == ([], []) and paid(summary) == "" and not power_notes(summary)
    assert interval_table(summary, result_table(summary)) == ([], [])
    assert "chosen" not in summary.model_dump(mode="json")


def test_nobody_gains(done: Path) -> None:
    summary = changed(read_training(done), anna=row("anna", "local"), berta=row("berta", "local"))
    assert paid(summary).startswith("No hospital takes another model") and "test patients" not in paid(summary)
    few = changed(read_training(done), anna=row("anna", "personal"))
    assert paid(few).endswith("too few test patients to say how sure that is.")


def test_it_is_said_that_fine_tuning_was_trained_longer(done: Path) -> None:
    """A hospital whose choice has five local rounds more than its local model may owe its gain to them."""
    summary = read_training(done).model_copy(update={"scored": {"local": "local steps", "personal": "mixing"}})
    longer = {**summary.scored, "fedavg_finetuned": "mixing and up to 5 local rounds more"}
    both = {
        "anna": row("anna", "fedavg_finetuned"),
        "berta": row("berta", "average"),
        "clara": row("clara", "personal"),
    }
    assert "longer" not in paid(changed(summary, **both))  # the average of models that were all trained alike
    told = paid(changed(summary.model_copy(update={"scored": longer}), **both))
    assert "At 2 of them it is FedAvg + fine-tuning, or the average with it" in told
    assert "mixing and up to 5 local rounds more: some of that gain can be the longer training." in told
    assert "longer" not in paid(changed(summary.model_copy(update={"scored": longer}), clara=row("clara", "personal")))


def test_so_many_patients_show_a_difference_four_times_in_five() -> None:
    reach = t.ppf(0.975, 24) / 5  # deviation 1
    found = Certainty(patients=25, interval=(0, 1), gain=0.3, gained=(0.3 - reach, 0.3 + reach))
    needed = patients_needed(found)
    assert needed == 88
    gains = np.random.default_rng(0).normal(0.3, 1 / np.sqrt(needed), 4000)
    assert np.mean(gains * np.sqrt(needed) > norm.ppf(0.975)) == pytest.approx(0.8, abs=0.02)
    assert patients_needed(found.model_copy(update={"gain": 0.0})) is None


@pytest.mark.parametrize("gain", [5e-324, 1e-300, 1e-160])
@pytest.mark.parametrize("reach", [0.1, 1e100])
def test_a_gain_next_to_nothing_needs_no_number_of_patients(gain: float, reach: float) -> None:
    """What a hospital says, and the report that ends a job is made of it: beyond all numbers, it ended the job."""
    assert patients_needed(Certainty(patients=8, interval=(0, 1), gain=gain, gained=(-reach, reach))) is None


@pytest.mark.parametrize("patients", [8, 15, 40])
def test_of_few_patients_as_many_are_needed_as_of_many(patients: int) -> None:
    """Their interval is wider than 1.96 errors to either side, for which it was taken: of 8 a third too many."""
    rng, found = np.random.default_rng(0), []
    for _ in range(100):
        gains = rng.normal(size=patients)
        drawn = gains[rng.integers(patients, size=(2000, patients))].mean(axis=1)
        reach = interval_of(drawn, patients)
        assert reach is not None
        found.append((error_of(reach, patients) / gains.std(ddof=1) * np.sqrt(patients)) ** 2)
    assert np.mean(found) == pytest.approx(1.0, abs=0.08)


def test_the_mean_gains_interval_by_hand() -> None:
    """MOVER: hospitals of gains 0.1 [0, 0.3] and 0.3 [0.2, 0.5]; below sqrt(0.1^2 + 0.1^2) / 2, above twice as far."""
    lines = [line_of(0.1, (0.0, 0.3)), line_of(0.3, (0.2, 0.5))]
    low, high = mean_band(lines) or (np.nan, np.nan)
    assert low == pytest.approx(0.2 - np.sqrt(0.02) / 2) and high == pytest.approx(0.2 + np.sqrt(0.08) / 2)
    assert mean_band([*lines, line_of(None, None)]) is None and mean_band([]) is None


def test_the_mean_gains_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    truth, deviations = np.array([0.1, 0.0, 0.3, -0.1]), np.array([0.02, 0.1, 0.05, 0.2])
    reach, held = norm.ppf(0.975) * deviations, 0
    for _ in range(400):
        seen = truth + deviations * rng.standard_normal(4)
        lines = [line_of(float(g), (float(g - r), float(g + r))) for g, r in zip(seen, reach, strict=True)]
        low, high = mean_band(lines) or (np.nan, np.nan)
        held += low <= truth.mean() <= high
    assert 0.92 < held / 400 < 0.98


def test_the_gain_over_the_last_rounds_local_model_has_no_interval_of_the_best_rounds() -> None:
    """Fine-tuning has one model, in both tables; beside "+0.400" of the last round stood "[0.05, 0.15]"."""
    from summaries import result, summary, sure

    tuned = result("anna", "fedavg_finetuned", 0.6, sure(0.5, 0.7, (0.05, 0.15)))
    content = summary((tuned, 0.5))
    last = content.test[0].model_copy(update={"metrics": {"dice": 0.2}, "choice": "last"})
    content = content.model_copy(update={"test": [*content.test, last, tuned]})
    assert result_table(content).gain_texts() == ["", "+0.100 [0.05, 0.15]"]
    assert result_table(content, "last").gain_texts() == ["", "+0.400"]


def line_of(gain: float | None, gained: tuple[float, float] | None) -> FinalLine:
    sure = Certainty(patients=8, interval=(0.5, 0.6), gain=gain, gained=gained)
    return FinalLine(
        site="a", model="personal", split="test", round=1, metrics={"dice": 0.5}, choice="best", certainty=sure
    )


def test_who_takes_another_model_is_not_said_to_gain_by_it() -> None:
    """Of a hospital whose test got worse, the page said so in one sentence and "joining paid" in the next."""
    worse = summary((result("anna", "fedavg", 0.5, sure(0.4, 0.6, (-0.2, -0.05))), 0.6))
    said = paid(worse)
    assert said.startswith("1 of 1 hospital takes another model than the one trained there alone, which its validation")
    assert said.endswith("On its test patients the gain over the local model is surely below zero (95 % interval).")
    assert "paid" not in said and "made the test Dice worse" in sentences(worse)[0]


def test_where_the_score_is_not_defined_patients_are_not_said_to_be_too_few() -> None:
    """Twelve test patients without an event have no C index, and no interval for that reason."""
    one, both = ("anna", "fedavg", None, None), ("bert", "fedavg", None, None)
    for content in (summary((result(*one), None)), summary((result(*one), None), (result(*both), None))):
        assert paid(content).endswith("validation cases support.") and "not defined" in sentences(content)[0]


def test_the_table_of_choices_names_the_score_as_the_others_do() -> None:
    """It said "test hd95_1 (mm)", and not that lower is better."""
    measure = Measure(direction="lower", unit="mm", class_number=1)
    content = summary((result("anna", "fedavg", 5.0, None, "hd95_1"), 6.0), measure=measure)
    assert chosen_table(content)[0][2] == "test hd95 of liver (mm, lower is better)"


def test_one_hospital_that_takes_another_model_is_told_of_as_one() -> None:
    """ "On their test patients the gain is surely above zero at 0 of them", of a single hospital."""
    unsure = paid(summary((result("anna", "fedavg", 0.5, sure(0.4, 0.6, (-0.2, 0.1))), 0.4), also="bert"))
    assert unsure.endswith("gain over the local model is neither surely above nor surely below zero (95 % interval).")
    content = summary((result("anna", "average", 0.5, sure(0.4, 0.6, (0.01, 0.1))), 0.4))
    tuned = paid(content.model_copy(update={"scored": {"fedavg_finetuned": "mixing and 1 local round more"}}))
    assert " That is FedAvg + fine-tuning, or the average with it, whose score is after mixing and 1 local" in tuned
    assert tuned.endswith("On its test patients the gain over the local model is surely above zero (95 % interval).")
    assert not re.search(r"\b(their|them)\b", unsure + tuned)


def test_an_end_that_is_not_zero_is_not_written_as_zero_in_tables() -> None:
    """ "[0.00, 0.20]" of a gain that is surely above zero, and "[-0.00, 0.06]" of one that is not."""
    above = summary((result("anna", "fedavg", 0.5, sure(0.4, 0.6, (0.001, 0.2))), 0.4))
    assert chosen_table(above)[1][0][3] == "+0.10 [0.001, 0.200]"
    assert interval_text((-0.0004, 0.06)) == "[-0.000, 0.060]" and interval_text((-0.004, 0.06)) == "[-0.004, 0.060]"
    none = summary((result("anna", "fedavg", 0.5, sure(0.4, 0.6, (0.0, 0.2))), 0.4))
    assert chosen_table(none)[1][0][3] == "+0.10 [0.00, 0.20]"
