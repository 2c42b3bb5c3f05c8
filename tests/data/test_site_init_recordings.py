# SPDX-License-Identifier: Apache-2.0
"""``medpfl site init`` of a folder of recordings: what it writes loads and passes the data check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from medpfl.check.reading import inspect
from medpfl.cli import app
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.declared import Problems
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.schema import schema_of
from medpfl.data.series.declare import Series
from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table

Write = Callable[[Path, int], None]


def write(path: Path, number: int, separator: str = ",", decimal: str = ".", steps: int = 40, **more: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [["time", "I", "II", "rhythm", *more]]
    for step in range(steps + number):
        values = [f"{step / 100:.2f}", f"{np.sin(step + number):.3f}", f"{number}.5"]
        rows.append([*(value.replace(".", decimal) for value in values), ("sinus", "af")[number % 2], *more.values()])
    path.write_text("".join(separator.join(row) + "\n" for row in rows))


def init(place: Path, output: Path, **given: str) -> dict[str, Any]:
    """The declared dataset, as ``--yes`` gives it; its data are sound."""
    write_site_file(place, output, Answers({"site": "here", "dataset": "ecg", **given}))
    (inspection,) = [inspect(name, dataset) for name, dataset in load_site_file(output, "here").datasets.items()]
    assert not inspection.problems and inspection.splits["train"].cases
    found: dict[str, Any] = yaml.safe_load(output.read_text())["datasets"]["ecg"]
    return found


def test_a_folder_of_recordings(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path / "ecg" / f"p{number}.csv", number)
    assert init(tmp_path / "ecg", tmp_path / "site.yaml") == {
        "kind": "series",
        "files": "ecg/*.csv",
        "channels": ["I", "II"],  # and no time
        "label": {"column": "rhythm", "classes": {"af": ["af"], "sinus": ["sinus"]}},
        "window": {"length": 40},
        "split": {"seed": 0, "fractions": {"train": 0.6, "validation": 0.2, "test": 0.2}},
    }


def test_as_much_of_europe_writes_them_and_in_the_folder_itself(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path / f"p{number}.csv", number, ";", ",", steps=1500)
    found = init(tmp_path, tmp_path / "site.yaml")
    assert found["files"] == "*.csv" and (found["separator"], found["decimal"]) == (";", ",")
    assert found["channels"] == ["I", "II"] and found["window"] == {"length": 1000}


def test_a_folder_for_each_patient(tmp_path: Path) -> None:
    """What the folder is called is a column, and the recordings in it stay together."""
    for number in range(16):
        write(tmp_path / "ecg" / f"anna{number // 2}" / f"{number % 2}.csv", number)
    found = init(tmp_path / "ecg", tmp_path / "site.yaml", label="rhythm")
    assert found["files"] == "ecg/{folder}/*.csv" and found["split"]["group"] == "folder"
    listing = load_site_file(tmp_path / "site.yaml").dataset("ecg", Series).cases(Problems())
    groups = {split: {case.group for case in cases} for split, cases in listing.items()}
    assert set.union(*groups.values()) == {f"anna{number}" for number in range(8)}
    assert sum(map(len, groups.values())) == 8


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    for number in range(16):
        write(tmp_path / "ecg" / ("ill", "well")[number % 2] / f"{number}.csv", number)
        text = (tmp_path / "ecg" / ("ill", "well")[number % 2] / f"{number}.csv").read_text()
        kept = [line.rsplit(",", 1)[0] for line in text.splitlines()]  # without the rhythm
        (tmp_path / "ecg" / ("ill", "well")[number % 2] / f"{number}.csv").write_text("\n".join(kept))
    found = init(tmp_path / "ecg", tmp_path / "site.yaml")
    assert found["label"] == {"column": "folder", "classes": {"ill": ["ill"], "well": ["well"]}}
    assert "group" not in found["split"] and found["channels"] == ["I", "II"]
    assert "every recording counts as another patient; name" in (tmp_path / "site.yaml").read_text()


def test_patients_in_the_names_of_recordings_are_named_as_the_comment_says(tmp_path: Path) -> None:
    """It said "cases of one recording stay together", and a patient's second recording was among the tests."""
    for number in range(16):
        write(tmp_path / "ecg" / f"p{number // 2}_{number % 2}.csv", number)
    init(tmp_path / "ecg", tmp_path / "site.yaml", label="rhythm")
    text = (tmp_path / "site.yaml").read_text()
    text = text.replace("ecg/*.csv", '"ecg/{patient}_*.csv"').replace("split:", "split:\n      group: patient")
    (tmp_path / "site.yaml").write_text(text)
    listing = load_site_file(tmp_path / "site.yaml").dataset("ecg", Series).cases(Problems())
    groups = {split: {case.group for case in cases} for split, cases in listing.items()}
    assert set.union(*groups.values()) == {f"p{number}" for number in range(8)} and sum(map(len, groups.values())) == 8


def test_gaps_patients_and_a_number_to_predict(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path / "ecg" / f"{number}.csv", number, patient=f"q{number // 2}", dose=f"{number}.25")
    lines = (tmp_path / "ecg" / "3.csv").read_text().splitlines()
    lines[5] = lines[5].replace(lines[5].split(",")[1], "NaN")
    (tmp_path / "ecg" / "3.csv").write_text("\n".join(lines))
    found = init(tmp_path / "ecg", tmp_path / "site.yaml", label="dose", window="20")
    assert found["value"] == "dose" and found["split"]["group"] == "patient"
    assert found["missing_samples"] == "interpolate" and "NaN" in found["missing"]
    assert found["window"] == {"length": 20} and found["channels"] == ["I", "II"]


def test_a_single_recording_is_cut_in_time(tmp_path: Path) -> None:
    """--kind was left out in silence: neighbours in time were rows of training and of test."""
    steps = np.arange(400)
    (tmp_path / "ecg").mkdir()
    rows = "".join(f"{np.sin(step):.3f},{('af', 'sinus')[step // 50 % 2]}\n" for step in steps)
    (tmp_path / "ecg" / "one.csv").write_text("I,rhythm\n" + rows)
    for number, place in enumerate(("ecg", "ecg/one.csv")):
        found = init(tmp_path / place, tmp_path / f"{number}.yaml", kind="recording", label="rhythm")
        assert found["files"] == "ecg/one.csv" and found["split"]["time"] is True
        assert "a single recording is cut in time" in (tmp_path / f"{number}.yaml").read_text()
    found = init(tmp_path / "ecg", tmp_path / "own.yaml", kind="table", label="rhythm")
    assert found["kind"] == "table"


def test_a_case_is_no_longer_than_what_has_one_label(tmp_path: Path) -> None:
    """As long as the recording, so that the data check found no case at all."""
    (tmp_path / "har").mkdir()
    for number in range(12):
        labels = (["sit"] * 50 + ["walk"] * (45 + number)) * 2
        rows = "".join(
            f"{np.sin(step * (1 + number)):.3f},{label},p{number // 2}\n" for step, label in enumerate(labels)
        )
        (tmp_path / "har" / f"{number}.csv").write_text("acc,activity,patient\n" + rows)
    found = init(tmp_path / "har", tmp_path / "site.yaml")  # of two columns of texts one is the patient's
    assert found["window"] == {"length": 50} and found["label"]["column"] == "activity"
    assert "the shortest recording has 190, and each has 50 of one class" in (tmp_path / "site.yaml").read_text()


def test_the_axes_of_an_accelerometer_are_no_answer(tmp_path: Path) -> None:
    """The guess was to predict y from x."""
    for number in range(12):
        write(tmp_path / "ecg" / f"p{number}.csv", number)
        path = tmp_path / "ecg" / f"p{number}.csv"
        path.write_text(path.read_text().replace("time,I,II", "time,x,y"))
    found = init(tmp_path / "ecg", tmp_path / "site.yaml")
    assert found["channels"] == ["x", "y"] and found["label"]["column"] == "rhythm"


def test_like_another_hospitals(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path / "one" / f"p{number}.csv", number)
        write(tmp_path / "two" / f"p{number}.csv", number, ";", ",", steps=90)
        path = tmp_path / "two" / f"p{number}.csv"
        path.write_text(path.read_text().replace("time;I;II", "Zeit;i;Ableitung2"))
    init(tmp_path / "one", tmp_path / "one.yaml")
    schema = schema_of("ecg", load_site_file(tmp_path / "one.yaml").datasets["ecg"])
    answers = Answers({"site": "here"}, schema=schema, columns={"II": "Ableitung2"})
    write_site_file(tmp_path / "two", tmp_path / "two.yaml", answers)
    found = yaml.safe_load((tmp_path / "two.yaml").read_text())["datasets"]["ecg"]
    assert found["rename"] == {"i": "I", "Ableitung2": "II"} and found["channels"] == ["I", "II"]
    assert found["window"] == {"length": 40} and found["decimal"] == ","
    (inspection,) = [inspect(name, one) for name, one in load_site_file(tmp_path / "two.yaml").datasets.items()]
    assert not inspection.problems


def test_several_files_of_one_table(tmp_path: Path) -> None:
    for year in (2024, 2025):
        rows = "".join(f"{year - 2000 + n},{n % 3},{n % 2}\n" for n in range(20))
        (tmp_path / f"{year}.csv").write_text("age,grade,sick\n" + rows)
    found = init(tmp_path, tmp_path / "site.yaml", kind="table", label="sick")
    assert found["kind"] == "table" and found["files"] == ["2024.csv", "2025.csv"]
    assert len(load_site_file(tmp_path / "site.yaml").dataset("ecg", Table).cases(Problems())["train"]) == 24


@pytest.mark.parametrize("kind", ["recording", "table"])
def test_tables_with_other_columns_are_neither(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "a.csv", 0)
    write(tmp_path / "b.csv", 1, more="x")
    with pytest.raises(DataError, match=r"b\.csv: its columns are time, .*, more, those of .*a\.csv"):
        init(tmp_path, tmp_path / "site.yaml", kind=kind)
    assert not (tmp_path / "site.yaml").exists()


def test_one_sentence(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "ecg" / f"p{number}.csv", number)
    site = tmp_path / "site.yaml"
    with pytest.raises(DataError, match="--window: expected a number of time steps, got 'all'"):
        init(tmp_path / "ecg", site, window="all")
    with pytest.raises(SiteFileError, match="--label: 'rythm' is not there; expected one of: time, I, II, rhythm"):
        init(tmp_path / "ecg", site, label="rythm")
    with pytest.raises(DataError, match=r"column 'I' has more than 20 different values"):
        write_site_file(tmp_path / "ecg", site, Answers({"site": "h", "dataset": "e", "label": "I"}, {"a": [1]}))
    assert not site.exists()


def test_it_is_asked_what_they_are(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path / "ecg" / f"p{number}.csv", number)
    arguments = ["site", "init", str(tmp_path / "ecg"), "-o", str(tmp_path / "asked.yaml")]
    result = CliRunner().invoke(app, arguments, input="here\necg\n\n\n20\n\n\n", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Is each of the 8 tables a recording" in " ".join(result.output.split())
    assert yaml.safe_load((tmp_path / "asked.yaml").read_text())["datasets"]["ecg"]["window"] == {"length": 20}
