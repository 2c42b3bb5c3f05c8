# SPDX-License-Identifier: Apache-2.0
"""The server's checkpoint is written while the hospitals compute; nothing that it holds changes before it is there."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mapped import is_mapped
from medpfl.job import Job
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.loop import ending
from medpfl.rounds.memory import WANTED
from medpfl.rounds.messages import Message, flatten
from medpfl.rounds.server import checkpoint
from medpfl.rounds.server.behind import Behind
from medpfl.rounds.server.coordinator import Coordinator
from tools import assert_same, exchange, follow, outcome, pieces, ready, round_of, run

Make = Callable[..., Job]
Runners = dict[str, SiteRunner]


class Disk:
    """Where checkpoints are written: as they come, or, if it is ``slow``, each when it is ``let``; those after round
    ``full_after`` never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._go, self._save = threading.Semaphore(0), checkpoint.save
        self.slow, self.full_after = False, 99
        monkeypatch.setattr(checkpoint, "save", self._write)

    def _write(self, folder: Path, *given: Any) -> None:
        assert not self.slow or self._go.acquire(timeout=60)
        if given[-1].done > self.full_after:
            raise MedPFLError(f"cannot write {folder}: No space left on device")
        self._save(folder, *given)

    def let(self) -> None:
        self._go.release()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(monkeypatch)
    yield found
    found.let()  # no thread waits longer than its test


def arrived(coordinator: Coordinator, runners: Runners, number: int) -> dict[str, Message[Any]]:
    """The hospitals' answers of a round, where the server keeps them."""
    replies = exchange(runners, coordinator.rounds.train_messages(number, coordinator.joined))
    return {site: coordinator.arrived(site, reply) for site, reply in replies.items()}


def held_by(coordinator: Coordinator) -> dict[str, dict[str, torch.Tensor]]:
    """Hospital to what the server holds of it."""
    copies = coordinator.copies
    return {site: flatten(copies.of(site, copies.travelling)) for site in coordinator.joined}


def saved(folder: Path) -> list[int]:
    return sorted(number for state in (folder / "s" / "state").glob("*") for number in store.numbered(state, "server"))


@pytest.mark.parametrize("memory", ["1000", "0"])
def test_hospitals_train_while_it_is_written(
    make_job: Make,
    table_sites: dict[str, Path],
    tmp_path: Path,
    disk: Disk,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where models lie in files: those of the answers that come meanwhile stay."""
    whole = run(make_job(rounds=3), table_sites, tmp_path / "whole")
    disk.slow = True
    monkeypatch.setenv(WANTED, memory)
    coordinator, runners = pieces(make_job(rounds=3), table_sites, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2, 3):
        replies = arrived(coordinator, runners, number)  # the hospitals of the second round and the third have trained
        assert saved(tmp_path) == list(range(max(1, number - 2), number - 1))
        held = held_by(coordinator)
        assert number == 1 or all(is_mapped(t) == (memory == "0") for state in held.values() for t in state.values())
        before = {site: {key: t.clone() for key, t in state.items()} for site, state in held.items()}
        taking = threading.Thread(target=coordinator.rounds.take_train, args=(number, replies))
        taking.start()
        if number > 1:
            taking.join(0.3)
            assert taking.is_alive()  # it waits for the checkpoint
            now = held_by(coordinator)
            assert all(torch.equal(before[site][key], t) for site, state in now.items() for key, t in state.items())
            disk.let()
        taking.join()
    disk.slow = False
    disk.let()
    follow(ending(coordinator, lambda: coordinator.joined), runners)
    coordinator.close()
    assert_same(whole, outcome(tmp_path / "r"))


@pytest.mark.parametrize("memory", ["1000", "0"])
def test_killed_meanwhile_the_run_goes_on_from_the_one_before(
    make_job: Make,
    table_sites: dict[str, Path],
    tmp_path: Path,
    disk: Disk,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hospitals have trained two rounds more than the checkpoint that is left."""
    whole = run(make_job(rounds=4), table_sites, tmp_path / "whole")
    monkeypatch.setenv(WANTED, memory)
    coordinator, runners = pieces(make_job(rounds=4), table_sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    coordinator.rounds.take_train(2, arrived(coordinator, runners, 2))
    coordinator.close()
    for runner in runners.values():
        runner.close()
    disk.full_after = 2  # a killed process does not write what it was about to
    again, others = pieces(make_job(rounds=4), table_sites, tmp_path)
    ready(again, others)
    assert again.done == 2
    again.rounds.take_train(3, arrived(again, others, 3))
    arrived(again, others, 4)
    again.close()
    for runner in others.values():
        runner.close()
    assert saved(tmp_path) == [1, 2]
    disk.full_after = 99
    last, late = pieces(make_job(rounds=4), table_sites, tmp_path)
    ready(last, late)
    assert last.done == 2
    round_of(last, late, 3)
    round_of(last, late, 4)
    follow(ending(last, lambda: last.joined), late)
    last.close()
    assert_same(whole, outcome(tmp_path / "r"))


def test_a_full_disk_ends_the_job_before_anything_more_is_mixed(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, disk: Disk
) -> None:
    disk.full_after = 2
    coordinator, runners = pieces(make_job(rounds=3), table_sites, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2, 3):
        round_of(coordinator, runners, number)
    with pytest.raises(MedPFLError, match="No space left on device"):
        follow(ending(coordinator, lambda: coordinator.joined), runners)
    coordinator.close()
    assert saved(tmp_path) == [1, 2]


def test_what_nobody_waits_for_any_more_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise MedPFLError("the disk is full")

    behind = Behind("test")
    behind.start(fails)
    with pytest.raises(MedPFLError, match="the disk is full"):
        behind.wait()
    behind.wait()  # it is told once
    behind.start(fails)
    behind.close()
    assert "the disk is full" in caplog.text
