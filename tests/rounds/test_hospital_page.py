# SPDX-License-Identifier: Apache-2.0
"""The page that a job leaves at a hospital, and only there."""

import csv
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from medpfl.cli.sites import app
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Identity, Mean, SoftPull
from medpfl.deployed.evaluate import write_text
from medpfl.deployed.model_file import read_description
from medpfl.job import Job
from medpfl.methods import softpull
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.schedules import Schedule
from medpfl.results.files import read_training
from medpfl.results.sentences import sentences
from medpfl.rounds.hospital.cases import Cases, read_cases
from medpfl.rounds.hospital.models_folder import open_models
from medpfl.rounds.hospital.page import PAGE, _curves, write_page
from medpfl.rounds.loop import Watch, carry, training
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.tasks.metrics.decision import decision_curve
from medpfl.tasks.metrics.measure import Measure
from small_jobs import SITES, write_table_sites
from tools import exchange, pieces, run

Make = Callable[..., Job]


def plain(page: str) -> str:
    """A page's text without its tags."""
    return " ".join(unescape(re.sub(r"<[^>]+>", "", page)).split())


def found_of(rows: list[dict[str, str]], models: Path) -> float:
    """The share of the test cases of "yes" that lie above the threshold in the chosen model's file."""
    history = read_description(models / "chosen-best.safetensors").history
    assert history and history.chosen and history.chosen.operating[0].threshold
    ill = [row for row in rows if row["class"] == "1"]
    given = [float(row["probability"]) if row["predicted"] == "1" else 1 - float(row["probability"]) for row in ill]
    return sum(one > history.chosen.operating[0].threshold for one in given) / len(given)


@dataclass(frozen=True, kw_only=True)
class InTheSecondRound(Schedule):
    """Models learn in this round only, so that it is the best one, and stays it."""

    def factor(self, passed: float, rounds: float) -> float:
        return float(1 <= passed < 2)


@pytest.mark.slow
def test_every_hospital_has_a_page_and_the_server_none(make_job: Make, tmp_path: Path) -> None:
    run(make_job(), write_table_sites(tmp_path / "sites", rows=160), tmp_path)
    held = [path.read_bytes() for path in sorted((tmp_path / "results").rglob("*")) if path.is_file()]
    said = dict(zip(SITES, sentences(read_training(tmp_path / "results")), strict=True))
    assert not list((tmp_path / "results").rglob(PAGE))
    for site in SITES:
        models = tmp_path / "home" / site / "small" / "models"
        page = (models / PAGE).read_text()
        assert said[site] in plain(page)
        assert (models / PAGE).stat().st_mode & 0o077 == 0
        assert "<script" not in page and "http" not in page
        for heading in ("taken at their word?", "Would acting on it help?", "is drawn at that height"):
            assert heading in page
        taken = read_description(models / "chosen-best.safetensors").history
        assert taken and taken.chosen and "average" in taken.chosen.candidates
        assert ("is tested only where it is taken" in page) == (taken.chosen.model != "average")
        rows = list(csv.DictReader((models / "chosen-best.csv").open()))
        assert f'<td>yes</td><td data-of="sensitivity">{found_of(rows, models):.2f} [' in page
        wrong = [row["case"] for row in rows if row["class"] != row["predicted"]]
        if wrong:
            assert any(case in page for case in wrong)
        assert not [case for case in (row["case"] for row in rows) for content in held if case.encode() in content]
        (models / PAGE).unlink()
        result = CliRunner().invoke(app, ["site", "page", str(models)])
        assert result.exit_code == 0 and (models / PAGE).read_text() == page


@pytest.mark.slow
def test_another_run_of_a_job_leaves_the_models_of_the_first_and_its_page_tells_of_none_of_them(
    make_job: Make, tmp_path: Path
) -> None:
    sites = write_table_sites(tmp_path / "sites")
    home = tmp_path / "home" / "anna" / "small"
    run(make_job(), sites, tmp_path)
    first = {path.name: path.read_bytes() for path in (home / "models").iterdir()}
    for path in (home / "models").glob("*.csv"):
        assert path.stat().st_mode & 0o077 == 0
    run(make_job(mixers={"fedavg": Mean()}, method=FedAvg(lr=0.05, batch_size=8)), sites, tmp_path)
    (aside,) = home.glob("models-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == first and "chosen-best.csv" in first
    assert all(path.name.startswith("fedavg") for path in (home / "models").glob("*.safetensors"))
    page = plain((home / "models" / PAGE).read_text())
    assert "No model was chosen for anna: this job trained no local model" in page
    assert "(taken)" not in page and "FedAvg" in page and 'add "local" to its references' in page
    assert "Cases to look at" not in page


@pytest.mark.slow
def test_the_same_run_again_has_one_folder_and_with_more_cases_another(make_job: Make, tmp_path: Path) -> None:
    sites = write_table_sites(tmp_path / "sites")
    home = tmp_path / "home" / "anna" / "small"
    for _ in range(2):
        run(make_job(), sites, tmp_path)
        assert [path.name for path in home.glob("models*")] == ["models"]
    with (tmp_path / "sites" / "anna.csv").open("a") as file:
        file.write("0.5,0.5,0.5,1\n")
    for count in (2, 2):
        run(make_job(), sites, tmp_path)
        assert len(list(home.glob("models*"))) == count


@pytest.mark.slow
def test_a_run_made_again_takes_no_model_of_the_earlier_one_for_its_own(make_job: Make, tmp_path: Path) -> None:
    """A hospital that missed the best round has no best models. Those that the same job had left when it was run before
    lay in their places, "chosen" among them, and its page told of them."""
    sites = write_table_sites(tmp_path / "sites", rows=160)
    table = tmp_path / "sites" / "dora.csv"
    head, *rows = table.read_text().splitlines()  # alike in all but the label: whatever the model, the score is 0.5
    table.write_text("\n".join([head, *(f"1,0,1,{row[-1]}" for row in rows)]) + "\n")
    method = softpull.SoftPull(lr=0.5, batch_size=8, epochs=4, schedule=InTheSecondRound())
    job = make_job(rounds=4, mixers={"local": Identity(), "model": SoftPull(lam=1)}, method=method)

    def whole(away: str) -> Coordinator:
        coordinator, runners = pieces(job, sites, tmp_path)
        watch = Watch(asked=lambda number, joined: [site for site in joined if site != away or number != 3])
        carry(training(coordinator, watch), lambda asked: exchange(runners, asked.messages))
        for runner in runners.values():
            runner.close()
        return coordinator

    whole(away="")
    home = tmp_path / "dora" / "small"
    first = {path.name: path.read_bytes() for path in (home / "models").iterdir()}
    assert {"chosen-best.safetensors", "local-best.safetensors", PAGE} <= first.keys()
    assert {best.round for best in whole(away="dora").best.values()} == {2}
    left = {path.name for path in (home / "models").iterdir()}
    assert "local-last.safetensors" in left and not [name for name in left if "best" in name or name == PAGE]
    (aside,) = home.glob("models-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == first
    assert [path.name for path in (tmp_path / "anna" / "small").glob("models*")] == ["models"]


def test_a_folder_that_does_not_say_any_more_whose_run_it_is_is_moved_aside(tmp_path: Path) -> None:
    """The end of the job failed at the hospital, with Python's own error."""
    folder = open_models(tmp_path, "run", "now").folder
    written(folder / "personal-best.safetensors", "a model")
    (folder / ".run").write_bytes(b"\xff\x00")
    assert open_models(tmp_path, "run", "now").folder == folder == open_models(tmp_path, "run", "now").folder
    (aside,) = tmp_path.glob("models-*")
    assert (aside / "personal-best.safetensors").is_file() and [path.name for path in folder.iterdir()] == [".run"]


def test_what_was_half_written_when_a_run_was_killed_goes_when_it_is_taken_up(tmp_path: Path) -> None:
    """Half a model and half a list of patients' cases stayed beside the models for ever, under hidden names."""
    folder = open_models(tmp_path, "run", "now").folder
    written(folder / "personal-best.safetensors", "a model")
    for name in (".personal-best.safetensors.4711", ".personal-last.csv.4711", "..run.4711"):
        (folder / name).write_text("half")
    assert open_models(tmp_path, "run", "now").folder == folder
    assert sorted(path.name for path in folder.iterdir()) == [".run", "personal-best.safetensors"]
    for path in folder.iterdir():
        path.unlink()
    (folder / "..run.4711").write_text("half")  # it was killed before it had written anything else
    assert [path.name for path in open_models(tmp_path, "run", "now").folder.iterdir()] == [".run"]
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_a_private_file_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, replace = [], os.replace

    def watch(source: str, target: str) -> None:
        modes.append(os.stat(source).st_mode & 0o777)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    write_text(tmp_path / "page.html", "anna", private=True)
    assert modes == [0o600]


def test_where_the_picture_of_net_benefit_ends_below_is_said() -> None:
    """Acting on all patients had -0.09 at the threshold 0.90, by the picture, where it has -4."""
    truth, given = np.array([True, False]), np.array([0.7, 0.2])
    found = _curves(decision_curve(truth, given, [0.1, 0.9]))
    assert found["all"].endswith(" 90.0,59.6") and found["top"] == "0.44" and found["cut"] == "-0.09"
    assert not _curves(decision_curve(truth, given, [0.1, 0.5]))["cut"]


def test_a_folder_without_models_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(MedPFLError, match=r"no model there; expected the folder in which a job left"):
        write_page(tmp_path)


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_surest_wrong_answers_come_first(tmp_path: Path) -> None:
    file = written(
        tmp_path / "cases.csv", "case,class,predicted,probability", "p1,0,1,0.7", "p2,1,0,0.9", "p3,1,1,0.75"
    )
    found = read_cases(file, "accuracy", Measure(), ["no", "yes"])
    assert [(one.case, one.said) for one in found.worst] == [
        ("p2", "no with 0.90, is yes"),
        ("p1", "yes with 0.70, is no"),
    ]
    assert [(one.count, one.given, one.right) for one in found.bins] == [
        (1, 0.7, 0.0), (1, 0.75, 1.0), (1, 0.9, 0.0)
    ]  # fmt: skip
    assert not read_cases(file, "accuracy", Measure(), ["a", "b", "c"]).decisions


def test_a_metric_of_cases_that_is_not_the_score_takes_no_picture_away(tmp_path: Path) -> None:
    """Of a classifier of another package with one, the page showed neither calibration nor the wrong answers."""
    head = "case,class,predicted,probability"
    plain = read_cases(written(tmp_path / "a.csv", head, "p1,0,1,0.7", "p2,1,1,0.9"), "accuracy", Measure(), ["n", "y"])
    more = written(tmp_path / "b.csv", f"{head},steps", "p1,0,1,0.7,1", "p2,1,1,0.9,0")
    assert plain.of == "class"
    assert read_cases(more, "accuracy", Measure(), ["n", "y"]) == plain


@pytest.mark.parametrize(("direction", "order"), [("higher", "bca"), ("lower", "acb")])
def test_cases_with_a_score_of_their_own_are_ordered_by_it(tmp_path: Path, direction: str, order: str) -> None:
    file = written(tmp_path / "cases.csv", "case,dice", "a,0.9", "b,0.1", "c,0.5", "d,nan")
    found = read_cases(file, "dice", Measure.model_validate({"direction": direction}), ["organ", "rest"])
    assert "".join(one.case for one in found.worst) == order
    assert found.middle and found.best and (found.middle.case, found.best.case) == (order[1], order[2])


def test_large_numbers_are_written_out(tmp_path: Path) -> None:
    """Of platelets "1.987e+05, is 2.341e+05" was told."""
    file = written(tmp_path / "cases.csv", "case,value,predicted", "a,234109,198733", "b,0.0123456,9000.4")
    said = [one.said for one in read_cases(file, "mae", Measure(direction="lower"), []).worst]
    assert said == ["198733, is 234109", "9000, is 0.01235"]


def test_no_file_of_cases_is_no_cases_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert read_cases(tmp_path / "none.csv", "dice", Measure(), []) == Cases()
    with pytest.raises(MedPFLError, match=r"cases.csv: not the test cases that a job wrote \(ValueError\)"):
        read_cases(written(tmp_path / "cases.csv", "case,dice", "a,much"), "dice", Measure(), [])


def test_cases_that_another_program_saved_or_cut_are_no_page_of_less(tmp_path: Path) -> None:
    """A spreadsheet with another separator, or the first rows only: calibration and cases were missing, or of some."""
    lines = ["case,class,predicted,probability", "p1,0,1,0.7", "p2,1,0,0.9", "p3,1,1,0.75"]
    file = written(tmp_path / "cases.csv", *lines)
    assert len(read_cases(file, "accuracy", Measure(), ["no", "yes"], 3).decisions) > 0
    for count, got in ((2, lines[:3]), (6, [*lines, *lines[1:]])):
        with pytest.raises(MedPFLError, match=rf"not the test cases that a job wrote: expected 3, got {count}"):
            read_cases(written(file, *got), "accuracy", Measure(), ["no", "yes"], 3)
    with pytest.raises(MedPFLError, match=r"its columns are \['case;class;predicted;probability'\]"):
        read_cases(written(file, *(line.replace(",", ";") for line in lines)), "accuracy", Measure(), ["no", "yes"], 3)
