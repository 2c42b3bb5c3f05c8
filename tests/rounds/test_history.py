# SPDX-License-Identifier: Apache-2.0
"""What was measured, on the server's disk: a round costs the same however many went before, and nothing is lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medpfl.core.mixers import SoftPull
from medpfl.results.files import read_mixing, read_traffic
from medpfl.results.record import Saved
from medpfl.results.schema import Line, RoundLine
from medpfl.rounds.server import history
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from small_jobs import small_job, write_table_sites
from tools import assert_same, outcome

ROUNDS = 5


@pytest.mark.slow
def test_what_a_round_writes_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PENDING", 1)
    sizes: list[int] = []  # of the files that a round wrote
    appended: list[int] = []  # of those that it made longer
    lines = tmp_path / "results" / "metrics.jsonl"

    def progress(coordinator: Coordinator) -> None:
        coordinator.settle()  # the checkpoint is written meanwhile
        grows = sum(path.stat().st_size for path in [*(tmp_path / "home").rglob(history.FILE), lines])
        files = (tmp_path / "home").rglob(f"*-{coordinator.done:05d}.safetensors")
        sizes.append(sum(path.stat().st_size for path in files))
        appended.append(grows)

    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    job = small_job(rounds=20, mixers={"model": SoftPull(lam=0.5)})
    simulate(job, sites, tmp_path / "results", tmp_path / "home", progress, test=False, every=0.0)
    spans = sizes[3:] + np.diff(appended)[2:]
    assert spans[-8:].mean() < 1.02 * spans[:8].mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was not stopped, in ``whole``, and the state of one that was, in ``home``."""
    folder = tmp_path_factory.mktemp("history")
    write_table_sites(folder / "sites", ["anna", "berta"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "PENDING", 6000)  # so that of four rounds some stand in the file, others do not
        sites = {site: folder / "sites" / f"{site}.yaml" for site in ("anna", "berta")}
        simulate(small_job(rounds=ROUNDS), sites, folder / "whole", folder / "other")
        simulate(small_job(rounds=ROUNDS), sites, folder / "killed", folder / "home", stop_after=4)
    assert file_of(folder / "home").stat().st_size
    return folder


def file_of(home: Path) -> Path:
    (file,) = home.glob(f"server/*/state/*/{history.FILE}")
    return file


def left(results: Path) -> dict[str, Any]:
    """All that was measured, without times."""
    lines = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    mixing = {key: matrix.tolist() for key, matrix in read_mixing(results).items()}
    return {"lines": lines, "traffic": read_traffic(results), "mixing": mixing}


def resumed(folder: Path, scratch: Path, damage: Callable[[Path], None]) -> list[str]:
    shutil.copytree(folder / "home", scratch / "home")
    damage(scratch / "home")
    sites = {site: folder / "sites" / f"{site}.yaml" for site in ("anna", "berta")}
    coordinator = simulate(small_job(rounds=ROUNDS), sites, scratch / "results", scratch / "home")
    assert_same_models(folder, scratch)
    return [event.event for event in coordinator.record.events if event.site == "server"]


def assert_same_models(folder: Path, scratch: Path) -> None:
    one, other = outcome(folder / "whole"), outcome(scratch / "results")
    assert_same({**one, "scores": []}, {**other, "scores": []})


@pytest.mark.slow
def test_all_that_was_measured_is_there_again(folder: Path, tmp_path: Path) -> None:
    assert resumed(folder, tmp_path, lambda home: None) == ["resumed after round 4 of an unfinished run"]
    assert left(tmp_path / "results") == left(folder / "whole")


@pytest.mark.slow
def test_so_it_is_where_the_newest_checkpoint_is_damaged(folder: Path, tmp_path: Path) -> None:
    """The one before knows less of the file, or of what moved there since."""

    def damage(home: Path) -> None:
        max(home.glob("server/*/state/*/server-*.safetensors")).write_bytes(b"")

    assert resumed(folder, tmp_path, damage)[-1] == "resumed after round 3 of an unfinished run"
    assert left(tmp_path / "results") == left(folder / "whole")


def flip(home: Path) -> None:
    file = file_of(home)
    content = bytearray(file.read_bytes())
    content[100] ^= 0x40
    file.write_bytes(content)


def cut(home: Path) -> None:
    file_of(home).write_bytes(file_of(home).read_bytes()[:-7])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "lost"),
    [(flip, "round 1"), (cut, "round "), (lambda home: file_of(home).unlink(), "rounds, 1 to ")],
    ids=["flipped", "cut", "removed"],
)
def test_what_is_lost_is_said_and_the_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], lost: str
) -> None:
    monkeypatch.setattr(history, "PENDING", 1)  # the file is written to again, behind the gap
    told = resumed(folder, tmp_path, damage)
    assert [text for text in told if lost in text and text.endswith("is damaged here and missing in the results")]
    assert 0 < len(left(tmp_path / "results")["lines"]) < len(left(folder / "whole")["lines"])
    whole = file_of(tmp_path / "home").read_bytes()
    assert whole.count(b'"round":5') > 0


@pytest.mark.slow
def test_a_new_run_has_a_history_of_its_own(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "other", tmp_path / "home")
    sites = {site: folder / "sites" / f"{site}.yaml" for site in ("anna", "berta")}
    simulate(small_job(rounds=ROUNDS), sites, tmp_path / "a", tmp_path / "home", stop_after=1)  # of a finished one
    coordinator = simulate(small_job(rounds=ROUNDS), sites, tmp_path / "b", tmp_path / "home")
    assert left(tmp_path / "b") == left(folder / "whole")
    assert not [event for event in coordinator.record.events if "damaged" in event.event]


def test_rounds_that_were_written_together_are_not_told_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``simulate`` writes the rounds of some seconds at once."""
    monkeypatch.setattr(history, "PENDING", 1)
    kept = history.Kept()
    written = history.History(tmp_path)
    for rounds in ([1, 2, 3], [4, 5]):
        lines: list[Line] = [RoundLine(round=number, seconds=0.0) for number in rounds]
        kept = written.add(Saved(round=rounds[-1], lines=lines, events=[], bytes=[], matrices={}))
    parts, told = history.History(tmp_path).restore(kept)
    assert [part.round for part in parts] == [3, 5] and not told
    file = tmp_path / history.FILE
    file.write_bytes(file.read_bytes().replace(b'"round":2', b'"round":9'))
    parts, told = history.History(tmp_path).restore(kept)
    assert [part.round for part in parts] == [5]
    assert told == ["what was measured in 3 rounds, 1 to 3, is damaged here and missing in the results"]


@pytest.mark.slow
def test_a_hospital_whose_only_round_is_lost_goes_on_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four hospitals, two a round, clara is asked in rounds 3 and 6. In round 6 she began anew, in silence."""
    monkeypatch.setattr(history, "PENDING", 1)
    sites = write_table_sites(tmp_path / "sites")
    job = small_job(rounds=6, hospitals_per_round=2)
    simulate(job, sites, tmp_path / "whole", tmp_path / "other")
    simulate(job, sites, tmp_path / "killed", tmp_path / "home", stop_after=4)
    lines = file_of(tmp_path / "home").read_bytes().split(b"\n")
    assert b'"asked":["anna","clara"]' in lines[3]
    lines[3] = lines[3].replace(b"clara", b"clarA", 1)
    file_of(tmp_path / "home").write_bytes(b"\n".join(lines))
    simulate(job, sites, tmp_path / "results", tmp_path / "home")
    whole, found = outcome(tmp_path / "whole"), outcome(tmp_path / "results")
    assert found["test"] == whole["test"]
    told = [event["event"] for event in json.loads((tmp_path / "results" / "summary.json").read_text())["events"]]
    assert "what was measured in round 3 is damaged here and missing in the results" in told
