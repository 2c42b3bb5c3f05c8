# SPDX-License-Identifier: Apache-2.0
"""Every command that a page or a notebook shows is there: its verbs and options exist, and a line that a reader
copies has all arguments that are required.

Nothing is run here; "docs/walkthrough.md" and the notebooks are, by tests/poc and test_notebooks.py."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import typer

import benchmarks.__main__
import medpfl.cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if page.name not in ("CHANGELOG.md", "cli.md")  # what there was before; made from the parser by a test
]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted(file for file in (ROOT / "deploy").rglob("*") if file.is_file())
STARTS = {
    "./poc/run": "medpfl poc run",
    "./poc/hospitals": "medpfl poc hospitals",
    "./poc/provision": "medpfl provision",
}
COMMAND = re.compile(r"(?:python3? -m benchmarks|medpfl|\./poc/(?:run|hospitals|provision))(?= |$)")


USAGE = typer.BadParameter.__mro__[1]  # click's UsageError, of which some versions of typer hold a copy


@lru_cache
def programs() -> dict[str, Any]:
    return {
        "medpfl": typer.main.get_command(medpfl.cli.app),
        "benchmarks": typer.main.get_command(benchmarks.__main__.app),
    }


FENCED = re.compile(r"^( *)```[a-z]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[str]:
    """What stands in a page as code for itself: between fences, or indented."""
    yield from (block for _, block in FENCED.findall(text))
    yield from re.findall(r"(?:(?:^    .*)?\n)+", FENCED.sub("", text), flags=re.MULTILINE)


def typed(block: str) -> Iterator[str]:
    """The lines of a block that begin with one of our commands."""
    for line in block.replace("\\\n", " ").splitlines():
        for part in re.split(r" && | \| (?![^[]*\])|; | > ", re.sub(r" #.*", "", line)):
            command = re.sub(r"^(?:\$ +)?(?:[A-Z_]+=\S+ +)*", "", part.strip())
            if COMMAND.match(command):
                yield command


def mentioned(text: str) -> Iterator[str]:
    """Commands within sentences."""
    for code in re.findall(r"`([^`]+)`", FENCED.sub("", text)):
        command = re.sub(r"^(?:[A-Z_]+=\S+ +)*", "", " ".join(code.split()))
        if COMMAND.match(command):
            yield command


def problem(command: str, whole: bool) -> str | None:
    """What the command's own parser has against a line; ``whole``: it is to be typed as it stands."""
    words = COMMAND.sub(lambda start: STARTS.get(start[0], start[0]), command, count=1)
    words = words.removeprefix("python3 -m ").removeprefix("python -m ")
    words = re.sub(r"[][]|\.\.\.| \| |\"\$@\"", " ", words)  # of what may be left out, all is looked at
    name, *arguments = shlex.split(words)
    one = programs()[name]
    context = typer.Context(one, info_name=name)
    while hasattr(one, "get_command"):
        if not arguments or arguments[0].startswith("-"):
            return None if not whole or arguments else f"'{context.command_path}' lacks its verb"
        verb, *arguments = arguments
        under = one.get_command(context, verb)
        if under is None:
            return None if verb.isupper() else f"'{context.command_path}' has no verb '{verb}'"  # VERB, in a sentence
        one, context = under, typer.Context(under, info_name=verb, parent=context)
    if not whole and len(arguments) == 1 and arguments[0].startswith("--"):
        told = {option for param in one.params for option in (*param.opts, *param.secondary_opts)}
        return None if arguments[0] in {*told, "--help"} else f"'{context.command_path}' has no option {arguments[0]}"
    try:
        values, left, _ = one.make_parser(context).parse_args(list(arguments))
    except USAGE as error:
        return f"'{context.command_path}': {error.format_message()}"
    if left:
        return f"'{context.command_path}' takes no '{left[0]}'"
    for param in one.params:
        given = values.get(param.name)
        if whole and param.required and not given and "--help" not in arguments:
            return f"'{context.command_path}' lacks {param.name}"
    return None


def wrong(text: str) -> list[str]:
    told = [problem(command, whole=True) for block in blocks(text) for command in typed(block)]
    return [one for one in (*told, *(problem(command, whole=False) for command in mentioned(text))) if one]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_there(page: Path) -> None:
    assert not wrong(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", [*NOTEBOOKS, *SCRIPTS], ids=lambda file: str(file.relative_to(ROOT)))
def test_the_commands_of_notebooks_and_deployments_are_there(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "\n".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
        assert not wrong(text)
    else:
        assert not [told for command in typed(text) if (told := problem(command, whole=True))]


def test_enough_of_them_are_found() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    whole = [command for text in texts for block in blocks(text) for command in typed(block)]
    assert len(whole) > 150 and len([one for text in texts for one in mentioned(text)]) > 150
    assert {one.partition("medpfl ")[2].split(" ")[0] for one in whole} >= {
        "simulate",
        "compare",
        "site",
        "check-data",
        "predict",
        "super",
        "poc",
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("medpfl simulte softpull_phantom", "no verb 'simulte'"),
        ("medpfl site allow KIT --clas package.Class", "No such option"),
        ("medpfl site allow", "lacks"),
        ("medpfl check-data a.yaml b.yaml", "takes no 'b.yaml'"),
        ("MEDPFL_HEART_DATA=DIR ./poc/run softpull_heart --site DIR", "No such option"),
        ("cd a && python -m benchmarks nothing  # a comment", "no verb 'nothing'"),
    ],
)
def test_a_misspelt_line_is_found(line: str, told: str) -> None:
    (found,) = wrong(f"Type\n\n    {line}\n\nand wait.\n")
    assert told in found
