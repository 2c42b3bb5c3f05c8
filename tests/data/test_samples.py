# SPDX-License-Identifier: Apache-2.0
"""Decoded data in memory or in a file: the same rows, within the stated budget, and the same training."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from medpfl.core.errors import DataError
from medpfl.data.declared import StorageRule
from medpfl.data.rows import FileRows
from medpfl.data.samples import Budget, Store, in_parallel
from medpfl.demo.phantom import write_phantoms
from medpfl.job import Job
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation
from tools import assert_same, run

Make = Callable[..., Job]


def stored(rows: torch.Tensor, parts: list[int], budget_rows: float) -> tuple[torch.Tensor | FileRows, Budget]:
    size = rows[0].numel() * rows.element_size()
    # Half a byte is the least budget that is not refused: nothing fits into it, not even one row of one byte.
    budget = Budget(StorageRule(memory_gb=max(budget_rows * size, 0.5) / 2**30), Path())
    store = Store(budget)
    for part in torch.split(rows, parts):
        store.append(part)
    assert len(store) == len(rows)
    return store.finish(), budget


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.uint8, torch.int64]))
@pytest.mark.slow
def test_file_and_memory_hold_the_same_rows(data: st.DataObject, dtype: torch.dtype) -> None:
    parts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(sum))
    shape = data.draw(st.sampled_from([(3,), (1, 2, 2), ()]))
    count = sum(parts)
    rows = torch.randint(0, 200, (count, *shape)).to(dtype)
    in_memory, _ = stored(rows, parts, count)
    in_file, budget = stored(rows, parts, 0)
    assert isinstance(in_memory, torch.Tensor) and isinstance(in_file, FileRows)
    assert budget.left >= 0
    assert in_file.shape == in_memory.shape == rows.shape and in_file.dtype == dtype
    index = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), max_size=6)), dtype=torch.int64)
    start = data.draw(st.integers(0, count))
    for key in (index, slice(start, start + 3), slice(None), torch.arange(count) % 2 == 0):
        expected = rows[key]
        assert torch.equal(in_memory[key], expected) and torch.equal(in_file[key], expected)
    assert in_memory.is_contiguous() and (in_memory + 1).shape == rows.shape


def test_what_spills_gives_its_memory_back() -> None:
    budget = Budget(StorageRule(memory_gb=100 / 2**30), Path())
    first, second = Store(budget), Store(budget)
    first.append(torch.zeros(20, dtype=torch.float32))
    assert budget.left == 20
    first.append(torch.ones(20, dtype=torch.float32))  # 160 bytes do not fit: all of it goes to the file
    assert budget.left == 100
    second.append(torch.zeros(25))
    assert isinstance(first.finish(), FileRows) and isinstance(second.finish(), torch.Tensor)
    assert first.finish()[:].sum() == 20


def test_a_scratch_folder_that_cannot_be_written(tmp_path: Path) -> None:
    store = Store(Budget(StorageRule(memory_gb=1e-9, scratch="nowhere"), tmp_path))
    with pytest.raises(DataError, match=r"scratch folder .*nowhere: No such file.*storage\.scratch"):
        store.append(torch.zeros(5))


def test_no_scratch_folder_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose disk is read-only: the sentence itself asked for the folder, and was a traceback."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/nowhere"])
    store = Store(Budget(StorageRule(memory_gb=1e-9), Path()))
    with pytest.raises(DataError, match=r"scratch folder of the system: No usable temporary.*storage\.scratch"):
        store.append(torch.zeros(5))


def test_a_scratch_folder_that_is_full_for_the_last_rows(tmp_path: Path) -> None:
    """A limit on the size of files stands for it here; few rows are written when all are there."""
    store = Store(Budget(StorageRule(memory_gb=1e-9, scratch="."), tmp_path))
    store.append(torch.ones(40, 2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(DataError, match=r"do not fit into the scratch folder .*: File too large; name another"):
            store.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_nothing_is_left_in_the_scratch_folder(tmp_path: Path) -> None:
    store = Store(Budget(StorageRule(memory_gb=1e-9, scratch="."), tmp_path))
    store.append(torch.zeros(1000))
    assert list(tmp_path.iterdir()) == []


def test_reading_in_parallel_keeps_the_order_and_the_first_error() -> None:
    assert list(in_parallel(lambda n: n * n, range(50))) == [n * n for n in range(50)]

    def fails(number: int) -> int:
        if number >= 7:
            raise DataError(f"case {number}")
        return number

    with pytest.raises(DataError, match="case 7"):
        list(in_parallel(fails, range(50)))


@pytest.mark.slow
def test_streamed_training_equals_training_from_memory(make_job: Make, tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    files = {site: folder / f"{site}.yaml" for site in write_phantoms(folder)[:2]}
    task = Segmentation("organ", size=(16, 16), spacing=(12.0, 12.0, 8.0), architecture=UNet((4, 8)))
    job = make_job(rounds=1, task=task)
    from_memory = run(job, files, tmp_path / "memory")
    for file in files.values():
        content = yaml.safe_load(file.read_text())
        content["storage"] = {"memory_gb": 1e-6}
        file.write_text(yaml.safe_dump(content))
    assert_same(run(job, files, tmp_path / "file"), from_memory)


@pytest.mark.slow
def test_memory_stays_within_the_budget() -> None:
    """400 MB of rows with a budget of 50 MB: the process grows by no more than the budget and some working room."""
    code = """
import resource, torch
from pathlib import Path
from medpfl.data.declared import StorageRule
from medpfl.data.samples import Budget, Store
part = torch.ones(100, 25_000)
store = Store(Budget(StorageRule(memory_gb=50e6 / 2**30), Path()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(40): store.append(part)
rows = store.finish()
for start in range(0, len(rows), 16): assert rows[start:start + 16].sum() > 0
print(type(rows).__name__, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    kind, grown = done.stdout.split()
    assert kind == "FileRows" and float(grown) < 50 + 25
