# SPDX-License-Identifier: Apache-2.0
"""Broken schemas and jobs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broken_inputs.broken import Broken, Change, Group, holding, replaced, without
from hospitals import change_json, change_yaml, write_table
from medpfl.bundle import find_job
from medpfl.check.check import check_data
from medpfl.data.schema import read_schema, schema_of
from medpfl.data.site_file import load_site_file
from medpfl.job import load_job

JOBS = Path(__file__).resolve().parents[3] / "jobs"
SCHEMA, META = "schema.yaml", "meta.json"
SERVER, CLIENT = "app/config/config_fed_server.json", "app/config/config_fed_client.json"


def write_schema(folder: Path) -> None:
    """A table, and the schema that it follows."""
    path = write_table(folder)
    (folder / SCHEMA).write_text(schema_of("blood", load_site_file(path).datasets["blood"]).as_yaml())


def of_schema(folder: Path) -> list[str]:
    """As ``medpfl check-data site.yaml --schema schema.yaml``."""
    known = read_schema(folder / SCHEMA)
    return check_data(folder / "site.yaml", None, None, lambda what, done, count: None, known).problems


def write_job(folder: Path) -> None:
    shutil.copytree(JOBS / "softpull_heart", folder, dirs_exist_ok=True)


def of_job(folder: Path) -> list[str]:
    """As ``medpfl check-job FOLDER``."""
    load_job(folder)
    return []


def change(file: str, edit: Callable[[Any], object]) -> Change:
    return lambda folder: change_json(folder / file, edit)


def workflow(content: Any) -> Any:
    return content["workflows"][0]["args"]


def executor(content: Any) -> Any:
    return content["executors"][0]["executor"]["args"]


def other_schema(edit: Callable[[Any], object]) -> Change:
    return lambda folder: change_yaml(folder / SCHEMA, edit)


GROUPS = [
    Group(
        "Schemas",
        write_schema,
        of_schema,
        [
            Broken("there is none", SCHEMA, without(SCHEMA)),
            Broken("not YAML", SCHEMA, holding(SCHEMA, "a: [\n")),
            Broken("a misspelt key", SCHEMA, replaced(SCHEMA, "classes:", "clases:")),
            Broken("of a dataset that is not declared", "urine", other_schema(lambda s: s.update(dataset="urine"))),
            Broken("of another kind of dataset", "images", other_schema(lambda s: s.update(kind="images"))),
            Broken("other classes", "classes", other_schema(lambda s: s.update(classes=["well", "sick"]))),
            Broken("another kind of answer", "survival", other_schema(lambda s: s.update(answer="survival"))),
            Broken(
                "a feature more", "height", other_schema(lambda s: s["declared"]["features"].update(height="number"))
            ),
            Broken("a feature less", "crp", other_schema(lambda s: s["declared"]["features"].pop("crp"))),
        ],
    ),
    Group(
        "Jobs",
        write_job,
        of_job,
        [
            Broken("no meta.json", META, without(META)),
            Broken("not JSON", SERVER, holding(SERVER, "{")),
            Broken("JSON that is a list", CLIENT, holding(CLIENT, "[]")),
            Broken("no number of hospitals", "min_clients", change(META, lambda c: c.pop("min_clients"))),
            Broken("no hospital at all", "min_clients", change(META, lambda c: c.update(min_clients=0))),
            Broken("a misspelt setting", "roundz", change(SERVER, lambda c: workflow(c).update(roundz=3))),
            Broken("no rounds", "rounds", change(SERVER, lambda c: workflow(c).update(rounds=0))),
            Broken(
                "a text where a number belongs", "rounds", change(SERVER, lambda c: workflow(c).update(rounds="ten"))
            ),
            Broken("no method", "method", change(CLIENT, lambda c: executor(c).pop("method"))),
            Broken(
                "a misspelt method",
                "SoftPul",
                change(CLIENT, lambda c: executor(c)["method"].update(path="medpfl.methods.softpull.SoftPul")),
            ),
            Broken(
                "a misspelt argument", "stepz", change(CLIENT, lambda c: executor(c)["method"]["args"].update(stepz=3))
            ),
            Broken(
                "a class that is not allowed",
                "os.system",
                change(CLIENT, lambda c: executor(c)["task"].update(path="os.system")),
            ),
            Broken("a step size below 0", "lr", change(CLIENT, lambda c: executor(c)["method"]["args"].update(lr=-1))),
            Broken("a key that FLARE does not have", "min_client", change(META, lambda c: c.update(min_client=2))),
        ],
    ),
    Group(
        "Names of jobs",
        lambda folder: None,
        lambda folder: [] if not (folder / "asked").exists() else [str(find_job((folder / "asked").read_text()))],
        [
            Broken("a misspelt name of a shipped job", "softpul_heart", holding("asked", "softpul_heart")),
        ],
    ),
]
