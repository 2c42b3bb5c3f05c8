# SPDX-License-Identifier: Apache-2.0
"""What a comparison with a single run of each method says of it, as one first has it."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from medpfl.compare.comparison_tables import chosen, markdown
from medpfl.compare.report import write_report
from medpfl.compare.results import Results
from medpfl.results.compact import read_compact

STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "compare-label-skew-sgd.json.xz"


def cut(value: Any, inside: str = "") -> Any:
    """With the first run alone."""
    if isinstance(value, list) and inside in ("seeds", "values", "curves", "best_rounds", "rounds") and value:
        return value[:1]
    if isinstance(value, dict):
        found = {key: cut(one, key) for key, one in value.items()}
        if "wins" in found:
            found |= {"pairs": 1, "p": None, "deviation": None}
        if isinstance(found.get("pairs"), list):
            found["pairs"] = found["pairs"][:1]
        return {**found, "sd": None} if "sd" in found else found
    return [cut(one) for one in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def content() -> Results:
    stored = cut(read_compact(STORED))
    stored |= {"pairs": 1, "smallest_p": 1.0}
    return TypeAdapter(Results).validate_json(json.dumps(stored))


def test_of_one_seed_no_deviation_is_promised(content: Results) -> None:
    """ "mean ± standard deviation over the seeds 0", and intervals "from patients and seeds"."""
    (head,) = [line for line in markdown(content).splitlines() if line.startswith("Test ")]
    assert ", of the seed 0; the round" in head and "standard deviation" not in head and "±" not in head
    assert "from patients and seeds" not in head


@pytest.mark.slow
def test_the_page_of_one_seed_tells_of_no_tests(content: Results, tmp_path: Path) -> None:
    """Below gains without any p stood "25 tests are shown and none is corrected for their number"."""
    write_report(content, tmp_path, [])
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", (tmp_path / "report.html").read_text())).split())
    assert "No p is shown." in text and "tests are shown" not in text
    assert "standard deviation over the 1" not in text and "1 runs" not in text and "over the 1 seed" not in text


def test_what_hospitals_choose_is_told_with_its_runs(content: Results) -> None:
    """Where one method's runs had failed but for one seed, the row of all methods was of that seed, without a word."""
    assert all("runs" not in line[0] for line in chosen(content)[1])
    missing = content.model_copy(update={"pairs": 5})
    assert [line[0] for line in chosen(missing)[1]] == [f"{row.name} (1 of 5 runs)" for row in content.chosen]
    assert content.chosen
