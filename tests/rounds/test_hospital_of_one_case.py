# SPDX-License-Identifier: Apache-2.0
"""The own page of a hospital with a single test case."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
import yaml

from medpfl.job import Job
from medpfl.rounds.hospital.page import PAGE
from small_jobs import SITES, write_table_sites
from tools import run


@pytest.mark.slow
def test_one_case_is_no_cases(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """It said "on 1 test cases" and "Tested on 1 cases"."""
    sites = write_table_sites(tmp_path / "sites")
    content = yaml.safe_load(sites[SITES[0]].read_text())
    content["policy"] = {"least_scored": 1}
    lines = sites[SITES[0]].with_name(f"{SITES[0]}.csv").read_text().splitlines()
    parts = ["part", "test", "validation", *["train"] * (len(lines) - 3)]
    text = "".join(f"{line},{part}\n" for line, part in zip(lines, parts, strict=True))
    sites[SITES[0]].with_name(f"{SITES[0]}.csv").write_text(text)
    content["datasets"]["blood"]["split"] = {"column": "part"}
    sites[SITES[0]].write_text(yaml.safe_dump(content))
    run(make_job(rounds=1), sites, tmp_path)
    page = (tmp_path / "home" / SITES[0] / "small" / "models" / PAGE).read_text()
    said = " ".join(unescape(re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)).split())
    for words in ("on 1 test case (", "Tested on 1 case,", "by 1 validation patient of", "All from 1 test case;"):
        assert words in said
    assert not re.search(r"\b1 (test )?(cases|patients)\b", said)
    inline = re.sub(r"</?(a|abbr)\b[^>]*>", "", page)
    assert "may lie anywhere. ECE 0." in inline  # it said "anywhere.ECE"
