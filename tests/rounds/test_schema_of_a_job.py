# SPDX-License-Identifier: Apache-2.0
"""A job names its dataset's schema, and who declares something else takes no part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hospitals import change_yaml
from medpfl.cli import app
from medpfl.core.errors import ConfigError
from medpfl.data.schema import read_schema, schema_of
from medpfl.data.site_file import load_site_file
from medpfl.job import Job, load_job
from medpfl.job.settings import Settings
from tools import pieces, ready

Make = Callable[..., Job]


def medpfl(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, f"{result.output} {result.exception}"


@pytest.fixture
def schema(table_sites: dict[str, Path], tmp_path: Path) -> Path:
    assert medpfl("schema", table_sites["anna"], "-o", tmp_path / "blood.yaml")[0] == 0
    return tmp_path / "blood.yaml"


def units(content: Any) -> object:
    return content["datasets"]["blood"].update(units={"c": "mg/dl"})


def test_its_digest_is_of_what_it_says(table_sites: dict[str, Path], schema: Path) -> None:
    file = load_site_file(table_sites["berta"])
    digest = read_schema(schema).digest
    assert digest == schema_of("blood", file.datasets["blood"]).digest and len(digest) == 64
    schema.write_text("# a remark\n" + schema.read_text())
    assert read_schema(schema).digest == digest
    schema.write_text(schema.read_text().replace("a: number, b: number", "b: number, a: number"))
    assert read_schema(schema).digest != digest


@pytest.mark.slow
def test_a_job_is_made_with_it_and_who_declares_otherwise_takes_no_part(
    table_sites: dict[str, Path], schema: Path, tmp_path: Path
) -> None:
    """Most hospitals, too: they agree with each other, and not with the job."""
    code, said = medpfl("job", "new", "ours", "--from", "softpull_heart", "--schema", schema, "-o", tmp_path / "jobs")
    assert code == 0, said
    job = load_job(tmp_path / "jobs" / "ours")
    assert isinstance(job, Job) and job.task.dataset == "blood"
    assert job.settings.schema == read_schema(schema).digest
    coordinator, runners = pieces(job, table_sites, tmp_path / "all")
    ready(coordinator, runners)
    assert coordinator.joined == sorted(table_sites) and not coordinator.record.events
    change_yaml(table_sites["dora"], units)
    coordinator, runners = pieces(job, table_sites, tmp_path / "one")
    ready(coordinator, runners)
    assert coordinator.joined == ["anna", "berta", "clara"]
    (event,) = (each.event for each in coordinator.record.events if each.site == "dora")
    assert "dora's declaration of the dataset does not follow the schema that the job names (its digest is " in event
    assert "'medpfl check-data SITE_FILE --schema FILE' says there what differs" in event
    for site in ("anna", "berta", "clara"):
        change_yaml(table_sites[site], units)
    code, said = medpfl("check-job", tmp_path / "jobs" / "ours", "--sites", table_sites["anna"].parent)
    assert code == 1 and said.count("does not follow the schema that the job names") >= 4, said


def test_without_one_no_digest_is_told(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    replies = {site: runners[site].handle(asked) for site, asked in coordinator.init_messages().items()}
    assert {reply.header.agreed for reply in replies.values()} == {None}


def test_what_is_no_digest() -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits, or null, got"):
        Settings(rounds=1, schema="blood.yaml")


def test_another_dataset_than_the_schemas(schema: Path, tmp_path: Path) -> None:
    made = ("job", "new", "ours", "--from", "softpull_heart", "--schema", schema, "--dataset", "heart")
    code, said = medpfl(*made, "-o", tmp_path)
    assert code == 1 and "the schema describes the dataset 'blood', not 'heart'" in said
