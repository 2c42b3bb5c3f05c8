# SPDX-License-Identifier: Apache-2.0
"""Hospitals' models that lie in files because memory does not suffice: the same run, bit for bit."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.mixers import Mixer, NetworkProx
from medpfl.job import Job
from medpfl.methods.pfednet import PFedNet
from medpfl.rounds.memory import WANTED, budget
from medpfl.rounds.server import checkpoint, shelf
from medpfl.rounds.simulate import simulate
from tools import assert_same, outcome, run

Make = Callable[..., Job]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setenv(WANTED, "0")


def models_of(home: Path) -> list[Path]:
    return sorted(home.glob(f"server/*/state/*/{checkpoint.MODELS}/*"))


def test_the_environment_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget() > 0
    monkeypatch.setenv(WANTED, "12")
    assert budget() == 12 * 2**20
    monkeypatch.setenv(WANTED, "much")
    with pytest.raises(ConfigError, match="MEDPFL_MEMORY must be a whole number of MiB, got 'much'"):
        budget()


@pytest.mark.parametrize("begun", [False, True], ids=["before the run", "in the run"])
def test_of_models_that_have_no_room_nothing_stays(tmp_path: Path, on_disk: Callable[[], None], begun: bool) -> None:
    """A limit on the size of files stands for a full disk."""
    on_disk()
    kept, before = shelf.Shelf(2, tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    if begun:
        kept.open(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(MedPFLError, match=r"cannot keep a hospital's models in .*: File too large"):
            kept.take({"model": {"a": torch.ones(1000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_on_disk_is_the_run_in_memory(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, on_disk: Callable[[], None]
) -> None:
    job = make_job(
        rounds=3, hospitals_per_round=3, clip_updates=1.0
    )  # absent hospitals, and updates shortened in place
    first = run(job, table_sites, tmp_path / "memory")
    assert not models_of(tmp_path / "memory" / "home")
    on_disk()
    assert_same(first, run(job, table_sites, tmp_path / "disk"))
    assert models_of(tmp_path / "disk" / "home")


@pytest.mark.slow
@pytest.mark.parametrize("back", [False, True])
def test_taken_up_again(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """A checkpoint of files is taken up on disk, and one of tensors where files are wanted now."""
    whole = run(make_job(rounds=4), table_sites, tmp_path / "whole")
    if not back:
        monkeypatch.setenv(WANTED, "0")
    simulate(make_job(rounds=4), table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    monkeypatch.setenv(WANTED, "0" if back else "1000")
    coordinator = simulate(make_job(rounds=4), table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))
    assert any("resumed after round 2" in event.event for event in coordinator.record.events)


@pytest.mark.slow
def test_of_a_damaged_file_the_checkpoint_before_is_taken(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, on_disk: Callable[[], None]
) -> None:
    on_disk()
    whole = run(make_job(rounds=4), table_sites, tmp_path / "whole")
    home = tmp_path / "home"
    simulate(make_job(rounds=4), table_sites, tmp_path / "a", home, stop_after=3)
    files = models_of(home)
    content = bytearray(files[-1].read_bytes())
    content[-1] ^= 1
    files[-1].write_bytes(content)
    coordinator = simulate(make_job(rounds=4), table_sites, tmp_path / "b", home)
    events = [event.event for event in coordinator.record.events]
    assert "the checkpoint after round 3 is damaged and not used" in events
    assert_same(whole, outcome(tmp_path / "b"))


@pytest.mark.slow
def test_a_finished_run_leaves_one_set_of_files_and_the_next_removes_them(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, on_disk: Callable[[], None]
) -> None:
    on_disk()
    run(make_job(rounds=2), table_sites, tmp_path)
    first = models_of(tmp_path / "home")
    assert len(first) == len(table_sites)
    run(make_job(rounds=2), table_sites, tmp_path)
    assert len(models_of(tmp_path / "home")) == len(table_sites)


@pytest.mark.slow
def test_a_graph_of_models(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, on_disk: Callable[[], None]
) -> None:
    mixers: dict[str, Mixer] = {"personal": NetworkProx(tau=0.1, s=0.5, graph="complete")}
    job = make_job(method=PFedNet(lr=0.05, batch_size=8), mixers=mixers, rounds=2)
    first = run(job, table_sites, tmp_path / "memory")
    on_disk()
    assert_same(first, run(job, table_sites, tmp_path / "disk"))


@pytest.mark.slow
def test_memory_of_messages_is_given_back_before_models_are_mixed(
    table_sites: dict[str, Path], make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library keeps what a message took, which would come on top of what mixing takes; in memory it may."""
    found: list[str] = []
    mix = NetworkProx.mix

    def mixed(self: NetworkProx, *given: Any) -> Any:
        found.append("mixed")
        return mix(self, *given)

    monkeypatch.setattr(NetworkProx, "mix", mixed)
    monkeypatch.setattr(shelf, "give_back", lambda: found.append("given back"))
    job = make_job(rounds=1, mixers={"model": NetworkProx(tau=0.1, graph="complete")})
    run(job, table_sites, tmp_path / "memory")
    assert found == ["mixed"]
    monkeypatch.setenv(WANTED, "0")
    found.clear()
    run(job, table_sites, tmp_path / "disk")
    place = found.index("mixed")
    assert found[place - 1] == "given back" and found.count("given back") > len(table_sites)
