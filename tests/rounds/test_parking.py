# SPDX-License-Identifier: Apache-2.0
"""Hospitals of one process that lie in files while others are at work: the same run, bit for bit."""

import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from every_method import EVERY, write_both
from medpfl.core import mapped
from medpfl.core.codecs import STC
from medpfl.core.mapped import is_mapped, map_file, move_to_file
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedbn import FedBN
from medpfl.rounds.memory import WANTED
from tools import assert_same, normed, run

Make = Callable[..., Job]


def test_tensors_move_in_place_and_keep_their_order(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    before, values, base = parameter.detach().clone(), torch.arange(7.0), torch.zeros(4)
    two = [base[:2], base[2:]]
    move_to_file([parameter, parameter, values, *two, values[::2], torch.empty(0)], tmp_path / "file")
    assert is_mapped(parameter) and parameter.stride() == before.stride() and torch.equal(parameter, before)
    assert not is_mapped(two[0])  # shares its memory with another
    assert parameter.data_ptr() % 64 == 0 and not list(tmp_path.iterdir())
    with torch.no_grad():
        parameter.add_(1)
    move_to_file([parameter, values], tmp_path / "file")
    assert torch.equal(parameter, before + 1)


def test_values_are_in_the_file_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped page that has no room on a full disk ends the process (SIGBUS); what is written raises OSError."""
    values, flags, written = torch.arange(5.0), torch.tensor([True, False]), []

    def mapping(path: Path) -> torch.Tensor:
        written.append(path.read_bytes())
        return map_file(path)

    monkeypatch.setattr(mapped, "map_file", mapping)
    move_to_file([values, flags], tmp_path / "file")
    assert written == [values.numpy().tobytes() + bytes(44) + flags.numpy().tobytes() + bytes(62)]
    assert values.tolist() == [0, 1, 2, 3, 4] and flags.tolist() == [True, False]


def test_a_file_that_has_no_room_is_removed(tmp_path: Path) -> None:
    values, before = torch.arange(1000.0), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            move_to_file([values], tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir()) and not is_mapped(values) and values[-1] == 999


@pytest.mark.slow
def test_a_parked_run_is_the_run(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = FedBN(lr=0.1, batch_size=8, optimizer="adam", optimizer_state="keep")
    job = make_job(method=method, mixers={}, task=normed(), rounds=3)
    job = dataclasses.replace(job, codecs=Codecs(STC(), STC()))
    first = run(job, table_sites, tmp_path / "memory")
    monkeypatch.setenv(WANTED, "0")
    assert_same(first, run(job, table_sites, tmp_path / "parked"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedSM", "PFedNet", "Scaffold"])
def test_methods_with_further_exchanges_graphs_and_state(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = write_both(tmp_path / "sites")[False]
    first = run(EVERY[name].job(), sites, tmp_path / "memory")
    monkeypatch.setenv(WANTED, "0")
    assert_same(first, run(EVERY[name].job(), sites, tmp_path / "parked"))
