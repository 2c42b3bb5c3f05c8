# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie in files, and the files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medpfl.core import safetensors_file
from medpfl.core.mapped import is_mapped, pieces, release
from medpfl.core.mixing import mix
from medpfl.core.network_lasso import gram

TYPES = [torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.uint8, torch.float16, torch.float64, torch.int32]


def of_every_type() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"{number}.é": (torch.randn(3, 2, generator=generator) * 9).to(kind) for number, kind in enumerate(TYPES)}
    return {**made, "empty": torch.empty(0, 3), "one": torch.tensor(7.5), "a.first": torch.arange(4)}


def test_the_file_is_the_librarys(tmp_path: Path) -> None:
    tensors = of_every_type()
    safetensors_file.write(tmp_path / "ours", tensors, {"said": 'a "word" ü'}, synced=True)
    save_file(tensors, tmp_path / "theirs", metadata={"said": 'a "word" ü'})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_is_written_to_mapped_tensors_is_in_the_file(tmp_path: Path) -> None:
    path, tensors = tmp_path / "models", of_every_type()
    safetensors_file.write(path, tensors, {}, synced=False)
    mapped = safetensors_file.open_mapped(path)
    assert mapped.keys() == tensors.keys()
    assert all(torch.equal(mapped[name], tensor) and is_mapped(mapped[name]) for name, tensor in tensors.items())
    mapped["0.é"].mul_(2)
    release(mapped.values())
    assert torch.equal(mapped["0.é"], tensors["0.é"] * 2)
    assert torch.equal(load_file(path)["0.é"], tensors["0.é"] * 2)
    path.unlink()
    assert torch.equal(mapped["0.é"], tensors["0.é"] * 2)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "models"
    safetensors_file.write(path, {"a": torch.ones(100)}, {}, synced=False)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="'a' ends beyond the file"):
        safetensors_file.open_mapped(path)


def test_pieces_are_the_whole() -> None:
    long = torch.arange(2_500_000, dtype=torch.float32)
    assert torch.equal(torch.cat([part for (part,) in pieces(long.view(2, -1))]), long)
    assert [len(part) for (part,) in pieces(torch.empty(0))] == [0]
    assert [part.shape for (part,) in pieces(torch.tensor(1.0))] == [(1,)]


@pytest.mark.parametrize("matrix", ["mean", "any"])
def test_mixed_out_of_core_as_in_memory_bit_for_bit(tmp_path: Path, matrix: str) -> None:
    generator = torch.Generator().manual_seed(1)
    states = [{"w": torch.randn(700_003, generator=generator), "n": torch.tensor(k)} for k in range(3)]
    mapped = []
    for k, state in enumerate(states):
        safetensors_file.write(tmp_path / str(k), state, {}, synced=False)
        mapped.append(safetensors_file.open_mapped(tmp_path / str(k)))
    rows = np.full((3, 3), 1 / 3)
    if matrix == "any":
        rows = np.random.default_rng(0).dirichlet(np.ones(3), size=3)
    assert np.array_equal(gram(mapped), gram(states))
    mix(rows, mapped, in_place=True)
    for one, other in zip(mapped, mix(rows, states), strict=True):
        assert torch.equal(one["w"], other["w"]) and torch.equal(one["n"], other["n"])
