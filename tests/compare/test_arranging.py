# SPDX-License-Identifier: Apache-2.0
"""A comparison's page can be sorted and filtered without a script, and equal rows are one: on published results."""

import html
import lzma
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from medpfl.compare import arranging
from medpfl.compare.arranging import ranked
from medpfl.compare.report import write_report
from medpfl.compare.results import Results, Row

pytestmark = pytest.mark.slow
PUBLISHED = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def phantom() -> Results:
    return Results.model_validate_json(lzma.decompress((PUBLISHED / "compare-phantom.json.xz").read_bytes()))


@pytest.fixture(scope="module")
def page(phantom: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(phantom, tmp_path_factory.mktemp("page"))


def test_the_page_says_whose_score_the_target_is(phantom: Results, page: Path, tmp_path: Path) -> None:
    whose = "(what Local reaches at its best)"
    assert phantom.file.target is None and whose in page.read_text()
    given = phantom.model_copy(update={"file": phantom.file.model_copy(update={"target": 0.5}), "target": 0.5})
    assert whose not in write_report(given, tmp_path).read_text()


def names(rows: Sequence[Row]) -> list[str]:
    return [row.name for row in rows]


def test_rows_with_equal_numbers_are_one(phantom: Results) -> None:
    rows = ranked(phantom)
    shown, same = arranging.collapsed(rows)
    assert same == {"FedAvg": ["Ditto (global)", "APFL (global)", "FedSM (global)", "MoE (global)"]}
    assert sorted([*names(shown), *same["FedAvg"]]) == sorted(names(rows))
    other = rows[0].model_copy(update={"name": "another", "curves": [[0.0]]})
    assert arranging.collapsed([rows[0], other])[1] == {}


def test_equal_means_stand_as_in_the_file(phantom: Results) -> None:
    """Of the same cases, added in another order: their last bits, which differ by machine, ruled the order."""
    mean = phantom.rows[0].best.mean
    assert mean is not None
    for step in (1e-16, -1e-16):
        rows = [
            row.model_copy(update={"best": row.best.model_copy(update={"mean": mean * (1 + place * step)})})
            for place, row in enumerate(phantom.rows)
        ]
        found = ranked(phantom.model_copy(update={"rows": rows}))
        assert len({row.best.mean for row in rows}) > 5 and names(found) == names(phantom.rows)


def test_each_order_is_of_its_numbers(phantom: Results) -> None:
    rows = ranked(phantom)
    leaderboard = dict(arranging.of_leaderboard(rows, phantom))
    assert leaderboard["best round"] == rows and names(leaderboard["name"])[:2] == ["APFL", "APFL (global)"]
    gains = [row.gain.mean for row in leaderboard["gain over Local"] if row.gain]
    assert gains == sorted(gains, reverse=True) and leaderboard["gain over Local"][-1].name == "Local"
    worst = [row.worst.score for row in leaderboard["worst-off hospital"] if row.worst]
    assert worst == sorted(worst, reverse=True)
    by_site = dict(arranging.of_hospitals(rows, phantom))["hospital-c"]
    scores = [row.hospitals["hospital-c"].best.mean or 0 for row in by_site]
    assert scores == sorted(scores, reverse=True) and names(by_site) != names(rows)
    assert "Local" not in names(dict(arranging.of_gains(rows, phantom))["mean"])


def test_the_page_holds_every_order_and_its_file_and_runs_nothing(phantom: Results, page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text and "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert not re.search(r"\son\w+=", re.sub(r"<pre>.*?</pre>|<svg.*?</svg>", "", text, flags=re.DOTALL))
    board = text.partition("<h2>Leaderboard")[2].partition("CSV: leaderboard")[0]
    assert board.count("<table>") == 4 and board.count('type="radio"') == 4 and board.count(" checked>") == 1
    assert board.count("the same in every run: Ditto (global), APFL (global)") == 4
    shown = [[int(place) for place in re.findall(r'class="row-(\d+)"', table)] for table in board.split("<table>")[1:]]
    assert shown[0] == sorted(shown[0]) and all(sorted(order) == shown[0] != order for order in shown[1:])
    written = html.unescape(text.rpartition("<pre>")[2].partition("</pre>")[0])
    assert type(phantom.file).model_validate(yaml.safe_load(written)) == phantom.file


def test_a_browser_shows_the_order_and_the_rows_that_are_chosen(page: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    text = page.read_text()
    chosen = text.replace('id="by-score-1" checked>', 'id="by-score-1">', 1)
    chosen = chosen.replace('id="by-score-4">', 'id="by-score-4" checked>', 1)  # by name
    chosen = chosen.replace('id="pick-0" checked>', 'id="pick-0">', 1)  # Ditto
    (tmp_path / "page.html").write_text(chosen)
    script = (
        "const d=document.querySelector('iframe').contentDocument;"
        "const seen=[...d.querySelectorAll('.sorts')[0].querySelectorAll('tr')].filter(r=>r.offsetParent);"
        "document.title=seen.map(r=>r.cells[0].firstChild.textContent).join('|')"
    )
    frame = f'<iframe src="page.html" width="1200" height="800" onload="{script}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<title>waiting</title>{frame}")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    shown = subprocess.run([*command, f"file://{tmp_path / 'frame.html'}"], capture_output=True, text=True, timeout=120)
    seen = shown.stdout.partition("<title>")[2].partition("</title>")[0].split("|")
    assert seen[:4] == ["method", "APFL", "Auto", "CusFL"] and "Ditto" not in seen and "SoftPull" in seen
