# SPDX-License-Identifier: Apache-2.0
"""A hospital's words reach the server's log, console and report: none of them moves a cursor, turns the reading
direction, or begins a line of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.shareable import Shareable
from rich.table import Table

from hostile import attacked, content, hospital_for_each, saying, told_of
from medpfl.cli import main
from medpfl.cli.terminal import console, say
from medpfl.core.errors import ProtocolError
from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.text import Answered, parse
from small_jobs import small_job
from tools import write_job

Make = Callable[..., Job]
CHARACTERS = {
    "csi": "\x9b2J",
    "escape": "\x1b[2J",
    "line": "a\nserver: resumed",
    "bidi": "\u202e10",
    "para": "a\u2029b",
}
FIRST: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "a version": lambda said, text: {"versions": {**said["versions"], "torch": text}},
    "a package": lambda said, text: {"versions": {**said["versions"], text: "1"}},
    "a class": lambda said, text: {"classes": [text, "yes"]},
    "what is common": lambda said, text: {"common": {text: "0" * 64}},
    "a buffer": lambda said, text: {"buffers": [text]},
    "a feature": lambda said, text: {"recipe": {**said["recipe"], "meaning": [text, *said["recipe"]["meaning"][1:]]}},
}


@pytest.mark.slow
def test_what_a_hospital_says_first_can_be_printed(make_job: Make, tmp_path: Path) -> None:
    """A version of torch with a terminal's command in it stood in the events, and on the console."""
    kinds = [*(f"{place}: csi" for place in FIRST), *(f"a version: {name}" for name in CHARACTERS)]
    sites, kind_of = hospital_for_each(kinds, tmp_path / "sites")

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if site in kind_of and asked.header.task == "init":
            place, name = kind_of[site].split(": ")
            return saying(honest, **FIRST[place](content(honest), CHARACTERS[name]))
        return honest

    job = make_job(rounds=1, mixers={"fedavg": Mean()}, method=FedAvg(lr=0.05, steps=1))
    coordinator, _ = attacked(job, sites, tmp_path, attack)
    for site, kind in kind_of.items():
        (event,) = told_of(coordinator, site)
        assert event.startswith("failed: the message is malformed") and event.isprintable(), (kind, event)
    assert coordinator.joined == ["yves", "zoe"]


@pytest.mark.parametrize("text", CHARACTERS.values())
def test_a_note_and_a_name_can_be_printed(text: str) -> None:
    said = {"task": "train", "round": 1, "metrics": [], "loss": {}, "notes": [], "seconds": 1.0}
    parse(Answered, json.dumps({"content": said}))
    for odd in ({"notes": [text]}, {"loss": {text: 1.0}}):
        with pytest.raises(ProtocolError) as refused:
            parse(Answered, json.dumps({"content": {**said, **odd}}))
        assert str(refused.value).isprintable()


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b2J", "a\rb", "\u202e10", "a\u2029b", "\x1b]0;x\x07"], ids=ascii)
def test_what_a_job_or_a_results_folder_says_moves_no_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Whoever checks a job before it may run sees what is wrong with it, and not what it writes over that."""
    job = write_job(small_job(2), tmp_path / "job")
    file = job / "app" / "config" / "config_fed_client.json"
    said = json.loads(file.read_text())
    said["executors"][0]["executor"]["args"]["method"]["path"] = f"medpfl.methods.x{text}.Y"
    file.write_text(json.dumps(said))
    monkeypatch.setattr("sys.argv", ["medpfl", "check-job", str(job)])
    with pytest.raises(SystemExit):
        main()
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.startswith("medpfl: config_fed_client.json: method: there is no class") and line.isprintable()
    table = Table("hospital")
    table.add_row(text)
    console.print(table, f"round 1, anna: {text}")
    shown = capsys.readouterr().out
    assert all(part.isprintable() for part in shown.split("\n")) and "round 1, anna: " in shown


def test_what_people_write_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    say("Zürich 横浜 صحة\u00a0%\ny [bold] :smile:")
    assert capsys.readouterr().out == "Zürich 横浜 صحة\u00a0%\ny [bold] :smile:\n"
