# SPDX-License-Identifier: Apache-2.0
"""A results folder that somebody altered, or that a hospital's words went into: reports show them as text, and whatever
does not fit is refused in one sentence."""

import json
import random
import shutil
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.mixers import Mean, ServerAdam, SoftPull
from medpfl.deployed.model_file import load_deployed
from medpfl.methods.fedsm import FedSM
from medpfl.results.report import write_report
from medpfl.rounds.server.joint import read_result
from small_jobs import small_job, write_table_sites
from tools import run

FILES = ("summary.json", "metrics.jsonl", "bytes.json")
WORDS = {
    "markup": "<script>alert(1)</script>",
    "attribute": "\" onload='alert(1)",
    "comment": "--><script>alert(1)</script>",
    "formula": "$\\frac$",
    "brackets": "[/red][bold",
    "template": "{{ 7 * 7 }}",
}
HOSTILE: list[Any] = [None, True, -1, 1e308, 10**400, "", "../../etc", "x" * 5000, [], [[]], {}, {"a": 1}, "$\\frac$"]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a small job left; nothing changes it."""
    folder = tmp_path_factory.mktemp("fedsm")
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.05)}
    sites = write_table_sites(folder / "sites", ["anna", "berta"])
    run(small_job(rounds=1, mixers=mixers, method=FedSM(lr=0.05)), sites, folder)
    return folder


@pytest.fixture
def results(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left / "results", tmp_path / "results"))


class Live(HTMLParser):
    """Of a page, what a browser would run, and what it would show."""

    def __init__(self, page: str):
        super().__init__()
        self.code: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.code += [value or "" for name, value in attrs if name.startswith("on") or "javascript:" in (value or "")]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.code.append(data)
        else:
            self.text += data


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.usefixtures("rendered")
@pytest.mark.slow
def test_a_report_shows_names_as_they_are(kind: str, results: Path) -> None:
    """Of a hospital, a model and a class."""
    for file in FILES:
        text = (results / file).read_text()
        for number, name in enumerate(("anna", "personal", "yes")):
            text = text.replace(f'"{name}"', json.dumps(f"{WORDS[kind]}{number}"))
        (results / file).write_text(text)
    done = CliRunner().invoke(app, ["report", str(results)])
    assert done.exit_code == 0, done.exception
    live = Live((results / "report.html").read_text())
    assert not any("alert" in text for text in live.code) and len(live.text) > 100


def places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def altered(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    found = content.copy()
    found[place[0]] = altered(content[place[0]], place[1:], value)
    return found


@pytest.mark.parametrize("read", [write_report, read_result])
@pytest.mark.slow
def test_an_altered_summary_is_refused_or_harmless(read: Callable[[Path], object], results: Path) -> None:
    path, draw = results / "summary.json", random.Random(0)
    content = json.loads(path.read_text())
    everywhere, refused = places(content)[1:], 0
    for place in draw.sample(everywhere, 40):
        path.write_text(json.dumps(altered(content, place, draw.choice(HOSTILE))))
        started = time.process_time()
        try:
            read(results)
        except MedPFLError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < ConfigError.LONGEST + 500, place
        assert time.process_time() - started < 3, place
    assert refused > 10


CONTENTS = [b"", b"[" * 100_000, b"\xff\xfe\x00", b'{"a": ' * 50_000, b"PK\x03\x04" + bytes(100)]


@pytest.mark.parametrize("name", [*FILES, "mixing.npz", "slots/global.safetensors"])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.slow
def test_another_content(name: str, content: bytes, results: Path) -> None:
    (results / name).write_bytes(content)
    for read in (write_report, read_result):
        try:
            read(results)
        except MedPFLError as error:
            assert "\n" not in str(error)


@pytest.mark.slow
def test_a_models_file_with_any_byte_flipped_is_refused(left: Path, tmp_path: Path) -> None:
    path = next(left.rglob("models/*.safetensors"))
    content, draw = path.read_bytes(), random.Random(0)
    for place in draw.sample(range(len(content)), 150):
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(MedPFLError) as refused:
            load_deployed(tmp_path / "model.safetensors")
        assert "\n" not in str(refused.value), place
