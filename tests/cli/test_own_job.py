# SPDX-License-Identifier: Apache-2.0
"""A job of one's own: written from a shipped one, tried with the hospitals' site files, and run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commands import refusal
from hospitals import change_json, change_yaml
from medpfl.bundle import find_job
from medpfl.cli import app
from medpfl.job import Job, load_job
from medpfl.tasks.survival import Survival
from medpfl.tasks.tabular import Tabular


def medpfl(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def folder(table_sites: dict[str, Path]) -> Path:
    return table_sites["anna"].parent


def test_it_has_the_methods_settings_and_its_own_data(tmp_path: Path) -> None:
    medpfl("job", "new", "ours", "--from", "softpull_heart", "--dataset", "blood", "--hospitals", 3, "-o", tmp_path)
    made, source = load_job(tmp_path / "ours"), load_job(find_job("softpull_heart"))
    assert isinstance(made, Job) and isinstance(source, Job)
    assert made.name == "ours" and made.min_clients == 3 and made.task.dataset == "blood"
    assert made.method == source.method and made.settings == source.settings and made.mixers == source.mixers
    assert json.loads((tmp_path / "ours" / "meta.json").read_text())["name"] == "ours"


def test_another_task(tmp_path: Path) -> None:
    medpfl(
        "job", "new", "rows", "--from", "softpull_phantom", "--task", "Tabular", "--dataset", "blood", "-o", tmp_path
    )
    made = load_job(tmp_path / "rows")
    assert isinstance(made.task, Tabular) and made.task.dataset == "blood"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ours", "--from", "softpull_haert"], "did you mean 'softpull_heart'?"),
        (["ours", "--from", "softpull_heart", "--task", "Tabulr"], "there is no task 'Tabulr'; there are:"),
        (
            ["ours", "--from", "softpull_heart", "--task", "Survival"],
            "argument 'horizons' of Survival is missing. Its defaults, with which --task takes a task, are not enough: "
            "make the job without --task, and write it into the job's config_fed_client.json in place of the other, as "
            '"task": {"path": "medpfl.tasks.survival.Survival", "args": {"dataset": "heart", "horizons": "..."}}',
        ),
        (
            ["ours", "--from", "softpull_heart", "--task", "RegionSegmentation"],
            "write it into the job's config_fed_client.json",
        ),
        (["../ours", "--from", "softpull_heart"], "the job's name must be letters, digits"),
    ],
)
def test_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in refusal(capfd, "job", "new", *arguments, "-o", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_task_that_needs_more_than_a_dataset_is_written_into_the_file(tmp_path: Path) -> None:
    """As the sentence says that it is done."""
    medpfl("job", "new", "ours", "--from", "softpull_heart", "--dataset", "ward", "-o", tmp_path)
    survival = {"path": "medpfl.tasks.survival.Survival", "args": {"dataset": "ward", "horizons": [365, 1825]}}
    (file,) = (tmp_path / "ours").rglob("config_fed_client.json")
    change_json(file, lambda content: content["executors"][0]["executor"]["args"].update(task=survival))
    assert load_job(tmp_path / "ours").task == Survival(dataset="ward", horizons=(365, 1825))


def test_a_job_is_never_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    medpfl("job", "new", "ours", "--from", "softpull_heart", "-o", tmp_path)
    assert "exists already" in refusal(capfd, "job", "new", "ours", "--from", "softpull_heart", "-o", tmp_path)


def test_the_hospitals_try_it(tmp_path: Path, folder: Path) -> None:
    medpfl("job", "new", "ours", "--from", "softpull_heart", "--dataset", "blood", "--rounds", 2, "-o", tmp_path)
    said = medpfl("check-job", tmp_path / "ours", "--sites", folder)
    assert "anna: train 24, validation 8, test 8" in said and "4 hospitals can begin ours" in said


def test_who_could_not_take_part_is_told_with_the_reason(tmp_path: Path, folder: Path) -> None:
    arguments = ("--from", "softpull_heart", "--dataset", "blood", "--hospitals", 2, "-o", tmp_path)
    medpfl("job", "new", "ours", *arguments)
    change_yaml(folder / "berta.yaml", lambda site: site.update(policy={"least_samples": 50}))
    change_yaml(folder / "clara.yaml", lambda site: site["datasets"]["blood"].update(units={"c": "mg/l"}))
    said = medpfl("check-job", tmp_path / "ours", "--sites", folder, code=1)
    assert "berta: would NOT take part; " in said and "50" in said
    assert "clara: would NOT take part; takes no part: clara's input 3 is 'c: number in mg/l'" in said
    assert "anna: train 24" in said


def test_too_many_hospitals_for_the_pull_are_told(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    medpfl("job", "new", "ours", "--from", "softpull_heart", "--dataset", "blood", "--hospitals", 5, "-o", tmp_path)
    said = refusal(capfd, "check-job", tmp_path / "ours", "--sites", folder)
    assert "only 4 of 4 hospitals are ready (anna, berta, clara, dora); the job needs 5" in said
