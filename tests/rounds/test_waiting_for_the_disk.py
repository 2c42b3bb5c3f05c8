# SPDX-License-Identifier: Apache-2.0
"""How often a round waits until something is on the disk: once at the server and once at each hospital."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from medpfl.rounds.hospital import mixed
from medpfl.rounds.hospital.mixed import drop_mixed, keep_mixed, load_mixed, small_mixed
from medpfl.rounds.hospital.private import Basis, save_private
from medpfl.rounds.hospital.run_files import RunFiles
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from small_jobs import small_job, write_table_sites
from tools import assert_same, outcome


def waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the rounds after the first, in which there is nothing mixed yet."""
    count, at = 0, []

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1

    def progress(coordinator: Coordinator) -> None:
        coordinator.settle()
        at.append(count)

    monkeypatch.setattr(os, "fsync", fsync)
    sites = write_table_sites(folder / "sites", ["anna", "berta"])
    simulate(small_job(rounds=4), sites, folder / "results", folder / "home", progress, every=0.0)
    return [after - before for before, after in itertools.pairwise(at)]


@pytest.mark.slow
def test_one_at_the_server_and_one_at_each_hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(tmp_path, monkeypatch) == [3, 3, 3]


@pytest.mark.slow
def test_large_models_are_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a file of their own, which is waited for too; the run is the same, taken up again as well."""
    waits(tmp_path / "small", monkeypatch)
    monkeypatch.setattr(mixed, "SMALL", 0)
    assert waits(tmp_path / "large", monkeypatch) == [5, 5, 5]
    assert_same(outcome(tmp_path / "small" / "results"), outcome(tmp_path / "large" / "results"))
    sites = {site: tmp_path / "large" / "sites" / f"{site}.yaml" for site in ("anna", "berta")}
    simulate(small_job(rounds=4), sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    simulate(small_job(rounds=4), sites, tmp_path / "b", tmp_path / "home")
    assert_same(outcome(tmp_path / "small" / "results"), outcome(tmp_path / "b"))


def network(value: float) -> nn.ModuleDict:
    found = nn.ModuleDict({"model": nn.Linear(1, 1)})
    nn.init.constant_(found["model"].weight, value)
    return found


def kept(folder: Path, round_number: int, best: set[int]) -> None:
    """A round as a hospital keeps it; its mixed models are filled with its number."""
    files = RunFiles(folder)
    keep_mixed(files, round_number - 1, network(round_number - 1).state_dict(), best)
    small = small_mixed(files, round_number - 1)
    save_private(files, round_number, Basis("", "", ""), {}, {}, {}, small, best)
    drop_mixed(files, round_number - 1)


def test_the_best_rounds_models_are_kept_and_others_go(tmp_path: Path) -> None:
    for number in range(2, 9):
        kept(tmp_path, number, {2} if number > 3 else set())
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"private-0000{number}.safetensors" for number in (3, 6, 7, 8)
    ]
    models, files = network(0.0), RunFiles(tmp_path)
    assert load_mixed(files, 2, models) is None and models["model"].weight.item() == 2.0
    assert "took no part" in str(load_mixed(files, 3, models)) and "took no part" in str(load_mixed(files, 8, models))


def test_killed_in_training_the_models_before_it_are_there(tmp_path: Path) -> None:
    """And killed before the small file was removed, it is there twice."""
    kept(tmp_path, 2, set())
    keep_mixed(RunFiles(tmp_path), 2, network(2.0).state_dict(), {1})
    copied = shutil.copytree(tmp_path, tmp_path.with_name("copied"))
    models = network(0.0)
    for files in (RunFiles(tmp_path), RunFiles(copied)):
        assert load_mixed(files, 2, models) is None and models["model"].weight.item() == 2.0
        assert load_mixed(files, 1, models) is None and models["model"].weight.item() == 1.0
        save_private(files, 3, Basis("", "", ""), {}, {}, {}, small_mixed(files, 2), {1})
    assert torch.equal(small_mixed(RunFiles(copied), 2)["model.weight"], torch.tensor([[2.0]]))
