# SPDX-License-Identifier: Apache-2.0
"""A hospital's words reach the server's log, console and report: none of them moves a cursor, turns the reading
direction, or begins a line of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.shareable import Shareable

from hostile import attacked, content, hospital_for_each, saying, told_of
from medpfl.core.errors import ProtocolError
from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.text import Answered, parse

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
