# SPDX-License-Identifier: Apache-2.0
"""Who was there until when: in the events, and as a column of the tables that a person reads."""

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from medpfl.results.files import read_summary, write_json
from medpfl.results.presence import absences, presence, stretches
from medpfl.results.report import write_page
from medpfl.results.schema import (
    ControllerArguments,
    Event,
    FinalLine,
    RoundLine,
    Stretch,
    TrainingLine,
    TrainingSummary,
)
from medpfl.results.terminal_table import print_results

GONE = {"anna": [(1, 5)], "berta": [(1, 2), (5, 5)], "clara": [(1, 1), (3, 3), (5, 5)], "dora": []}


def line(site: str, number: int) -> TrainingLine:
    return TrainingLine(site=site, round=number, seconds=1.0, loss={})


def summary(trained: dict[str, list[Stretch]], *absent: str) -> TrainingSummary:
    """Dora was refused in the beginning; the absent ones were not connected."""
    sites = ["anna", "berta", "clara"]
    tested = [FinalLine(site=site, model="local", round=1, metrics={"dice": 0.5}, choice="best") for site in sites]
    return TrainingSummary(
        classes=[], sizes={site: {"train": 9} for site in sites}, versions={}, components={},
        settings=ControllerArguments(rounds=5, seed=0), recipe=None, personalised="local", score="dice", codecs=None,
        job="stay", medpfl="1", written="now", roster=[*sites, "dora"], best={}, slots={}, test=tested,
        events=[Event(round=0, site=site, event="takes no part") for site in ("server", "dora", *absent)],
        trained=trained,
    )  # fmt: skip


def test_only_who_missed_a_round_is_told_of() -> None:
    rounds = {site: {n for first, last in found for n in range(first, last + 1)} for site, found in GONE.items()}
    lines = [line(site, number) for site, numbers in rounds.items() for number in numbers]
    trained = stretches([*lines, RoundLine(round=5, seconds=1.0)], list(GONE))
    assert trained == GONE
    assert absences(trained, 5) == {
        "berta": "trained in rounds 1-2, 5 of 5",
        "clara": "trained in rounds 1, 3, 5 of 5",
        "dora": "trained in none of 5",
    }


def test_nothing_is_said_where_all_were_there_or_where_it_is_not_known() -> None:
    assert presence(summary({site: [(1, 5)] for site in GONE})) == {}
    assert presence(summary({})) == {}


def test_the_console_has_a_column_and_a_row_for_who_took_no_part(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", summary(GONE, "emma"))
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    print_results(tmp_path, console)
    text = console.export_text()
    rows = {cells[1].strip(): cells[-2].strip() for text in text.splitlines() if len(cells := text.split("│")) > 3}
    assert "trained in rounds" in text
    assert rows == {
        "anna": "1-5 of 5", "berta": "1-2, 5 of 5", "clara": "1, 3, 5 of 5", "dora": "none of 5",
        "emma": "took no part", "mean": "", "gain over local": "",
    }  # fmt: skip
    write_json(tmp_path / "summary.json", summary({site: [(1, 5)] for site in GONE}))
    print_results(tmp_path, console)
    assert "trained in rounds" not in console.export_text()


def test_the_report_has_it_too(tmp_path: Path) -> None:
    page = write_page(tmp_path, summary(GONE, "emma"), [], {}, []).read_text()
    assert page.count("<th>trained in rounds</th>") == 2  # of the best and of the last round
    assert "<td>1-2, 5 of 5</td>" in page and "<td>took no part</td>" in page
    page = write_page(tmp_path, summary({}), [], {}, []).read_text()
    assert "trained in rounds" not in page


def test_a_summary_of_before_is_read(tmp_path: Path) -> None:
    content = json.loads(summary(GONE).model_dump_json())
    del content["trained"]
    (tmp_path / "summary.json").write_text(json.dumps(content))
    found = read_summary(tmp_path)
    assert isinstance(found, TrainingSummary) and found.trained == {}


def test_what_was_told_in_every_round_is_one_line_on_the_console_and_the_page(tmp_path: Path) -> None:
    """Before, of a hospital whose data had changed both showed as many equal sentences as the job had rounds."""
    made = summary({})
    again = [Event(round=number, site="berta", event="failed: other data") for number in (3, 4, 5, 5)]
    other = Event(round=4, site="clara", event="failed: other data")
    late = Event(round=5, site="berta", event="trained in rounds 1-2 of 5")
    made = made.model_copy(update={"events": [again[0], other, *again[1:], late]})
    write_json(tmp_path / "summary.json", made)
    console = Console(record=True, width=200, file=StringIO())
    print_results(tmp_path, console)
    write_page(tmp_path, made, [], {}, [])
    shown = [
        "rounds 3-5, berta: failed: other data",
        "round 4, clara: failed: other data",
        "round 5, berta: trained in rounds 1-2 of 5",
    ]
    printed = console.export_text().splitlines()
    assert [line for line in printed if line.startswith("round")] == shown
    page = (tmp_path / "report.html").read_text()
    assert "".join(f"<li>{line}</li>" for line in shown) in page
    assert len(read_summary(tmp_path).events) == 6  # the file has all of them
