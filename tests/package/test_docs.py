# SPDX-License-Identifier: Apache-2.0
"""The pages' links lead somewhere, and docs/concepts.md names files, classes and functions that are there."""

import dataclasses
import json
import re
from pathlib import Path

from medpfl.cli.federations import NEXT
from medpfl.job.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")


def test_every_step_of_fedavgs_life_is_in_its_file() -> None:
    steps = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 15
    for _, file, name in steps:
        text = (ROOT / "custom" / "medpfl" / file).read_text(encoding="utf-8")
        assert re.search(rf"\b(class|def) {name}\b", text), f"{file} has no {name}"


def test_every_file_and_module_that_is_named_is_there() -> None:
    package = ROOT / "custom" / "medpfl"
    for file in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert (package / file).is_file(), file
    for name in re.findall(r"`medpfl((?:\.[a-z_]+)+)", PAGE):
        assert (
            package.joinpath(*name.split(".")).with_suffix(".py").is_file()
            or package.joinpath(*name.split(".")).is_dir()
        )


def test_start_sh_does_not_print_where_the_next_command_is_typed() -> None:
    """FLARE prints its whole log there, for as long as a site runs: between the lines of 'medpfl site doctor', too."""
    lines = [line for page in (ROOT / "docs").rglob("*.md") for line in page.read_text(encoding="utf-8").splitlines()]
    typed = [line for line in lines if re.match(r"    KIT/startup/start\.sh", line)]
    assert len(typed) >= 3
    for command in [*typed, NEXT["server"], NEXT["hospital"]]:
        assert "KIT/startup/start.sh >> KIT/start.log 2>&1" in command, command


def test_links_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 150
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


def test_what_a_job_leaves_at_the_hospital_is_told_once_each() -> None:
    """The account of noise stood there twice, and FLARE's folder was to be kept "the same", for the row above it."""
    page = (ROOT / "docs" / "roles" / "hospital-it.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`KIT[^|]+) \| [^|]+ \| ([^|]+) \|", page, flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)) >= 5
    assert dict(rows)["`KIT/<job id>/`"] == "as the checkpoints"


def test_every_argument_of_the_controller_is_told_with_its_default() -> None:
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    table = page.split("The controller's arguments", 1)[1].split("\n## ", 1)[0]
    told: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", table, flags=re.MULTILINE):
        values = [defaults] if defaults.startswith("`") else defaults.split(", ")
        told |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    absent = {"none": None, "all": None, "(required)": dataclasses.MISSING}
    declared = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert {name: absent[word] if word in absent else _read(word) for name, word in told.items()} == declared


def _read(word: str) -> object:
    value = json.loads(word.strip("`"))
    return tuple(value) if isinstance(value, list) else value
