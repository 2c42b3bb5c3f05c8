# SPDX-License-Identifier: Apache-2.0
"""Stored results are compact, and their pages' tables are those that ``python -m benchmarks table`` makes of them."""

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app, verbs
from benchmarks.tables import keep, tables_of
from medpfl.core.errors import MedPFLError
from medpfl.results.compact import read_compact

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
FILES = sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*.json.?z")])
MOST = 2_500_000  # bytes of the folder, with pages and figures; a study with five seeds takes 10 to 30 kB
CELL = re.compile(r"\d\.\d{3} ± \d\.\d{3}")


@lru_cache
def tables(file: Path) -> str:
    return tables_of(file)


def cells_by_hand() -> list[tuple[str, str]]:
    """Page and cell of every "mean ± deviation" in a table, but for published figures."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8") + "\n", flags=re.MULTILINE):
            if "published" not in table.splitlines()[0]:
                found += [(page.name, cell) for cell in CELL.findall(table)]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@pytest.mark.slow
def test_the_command_makes_the_pages_tables(file: Path) -> None:
    """Block by block as they stand there; the page has a title and prose of its own."""
    name = file.name.partition(".")[0]
    page = (RESULTS / f"{name.removesuffix('-sgd')}.md").read_text(encoding="utf-8")
    blocks = [block for block in tables(file).strip().split("\n\n") if not block.startswith("#")]
    if name.endswith("-sgd"):  # the page of the same hospitals shows two of its tables, without the caption
        blocks = blocks[1:3]
    assert blocks
    for block in blocks:
        assert block in page, block


@pytest.mark.slow
def test_numbers_that_were_copied_into_other_tables_are_stored_ones() -> None:
    """README, "choosing a method", summaries beside papers' figures: each mean with deviation is one of a command's."""
    stored = {cell for file in FILES for cell in CELL.findall(tables(file))}
    found = cells_by_hand()
    assert len(found) > 1000
    assert not [(page, cell) for page, cell in found if cell not in stored]


def test_stored_results_are_small() -> None:
    assert len(FILES) > 40
    assert sum(file.stat().st_size for file in RESULTS.rglob("*") if file.is_file()) < MOST
    plain = {file.name.partition(".")[0] for file in FILES if not file.name.startswith("compare-")}
    measured = {verb.replace("-", "_") for verb in verbs()} - {"convolutions", "fuzz"}  # these write no such file
    assert plain == {*measured, "attacks_skin", "leave-one-out-phantom"}  # "attacks" writes two


def test_a_kept_result_is_smaller_and_has_the_same_tables(tmp_path: Path) -> None:
    """A mean that lies between two printed values keeps its digits; no number moves by more than a millionth."""
    source, long = RESULTS / "compare-pfednet-heart.json.xz", tmp_path / "results.json"
    content = read_compact(source)
    tie = 0.100499999999
    assert f"{tie:.3f}" != f"{round(tie, 6):.3f}"
    content["rows"][0]["best"] = {"mean": tie, "sd": 1 / 3, "values": [0.25, None]}  # type: ignore[index,call-overload]
    long.write_text(json.dumps(content))
    keep(long, tmp_path / "kept.json.xz")
    assert tables_of(tmp_path / "kept.json.xz") == tables_of(long)
    found = read_compact(tmp_path / "kept.json.xz")["rows"][0]["best"]  # type: ignore[index,call-overload]
    assert found == {"mean": tie, "sd": 0.333333, "values": [0.25, None]}
    with pytest.raises(MedPFLError, match="not a comparison's result"):
        keep(RESULTS / "mixing.json", tmp_path / "mixing.json.xz")


def test_the_verb_prints_what_is_stored(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["table", str(RESULTS / "mixing.json")], catch_exceptions=False)
    assert told.exit_code == 0 and told.output.strip() == tables_of(RESULTS / "mixing.json")
    (tmp_path / "other.json").write_text('{"bench": "os"}')
    with pytest.raises(MedPFLError, match="neither a benchmark's result nor a comparison's"):
        tables_of(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"bench": "tables"}', "neither a benchmark's result"),
        ('{"bench": "mixing"}', "not a whole result of the benchmark 'mixing': KeyError"),
        ('{"bench": "auto", "studies": {"none": {}}}', "not a whole result of the benchmark 'auto': KeyError"),
    ],
)
def test_a_result_that_is_cut_off(tmp_path: Path, text: str, words: str) -> None:
    """Each ended with a traceback."""
    (tmp_path / "cut.json").write_text(text)
    with pytest.raises(MedPFLError, match=words):
        tables_of(tmp_path / "cut.json")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.json", b"{", "not valid JSON"),
        ("x.json", b"[1]", "expected a JSON object, got a list"),
        ("x.json.gz", b"plain", "cannot read"),
        ("x.json.gz", b"\x1f\x8b\x08\x00", "not valid JSON"),
        ("x.json.xz", b"plain", "not valid JSON"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MedPFLError, match=words):
        read_compact(tmp_path / name)
