# SPDX-License-Identifier: Apache-2.0
"""What changes between the planning of runs and a run: it is refused, or its results would be kept under another's
name."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comparing import do, plan_of
from medpfl import store
from medpfl.compare.folds import Fold, make_folds
from medpfl.compare.folds import run as run_fold
from medpfl.core import sources
from medpfl.core.errors import ConfigError
from medpfl.data.site_file import CHECKPOINT
from medpfl.methods.softpull import SoftPull
from medpfl.methods.start import Start
from small_jobs import small_job, write_table_sites

THREE = ["anna", "berta", "clara"]
MINE = """
from dataclasses import dataclass
from typing import ClassVar

from medpfl.methods.contract import Method


@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    deploys: ClassVar = {"mine": "model"}

    def models(self, build):
        return {"model": build.network()}

    def local_round(self, site):
        site.fit("model")
"""
METHODS = {"Mine": {"path": "meanwhile.Mine"}}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the file of a method of one's own, which is imported; called with its text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two texts of one length in one second are two
    file = tmp_path / "meanwhile.py"
    file.write_text(MINE)
    importlib.import_module("meanwhile")

    def rewrite(text: str) -> None:
        file.write_text(text)

    yield rewrite
    del sys.modules["meanwhile"]


def as_in_a_new_process() -> None:
    """Nothing has been read of any code yet."""
    sources._known.clear()


def test_a_run_of_other_code_is_refused(
    tmp_path: Path, table_sites: dict[str, Path], write: Callable[[str], None]
) -> None:
    """A method that was changed while the comparison ran was trained as it was by then, and kept under the digest of
    the code of before: half of the seeds were of one method, half of another."""
    (mine,) = [run for run in plan_of(tmp_path, table_sites, methods=METHODS).runs if run.name == "Mine"]
    write(MINE.replace('site.fit("model")', "pass"))
    as_in_a_new_process()
    with pytest.raises(ConfigError, match="the code of the method, the task or MedPFL is not the one that this run"):
        do([mine], table_sites, tmp_path / "results")
    write(MINE.replace("class Mine", "# as it was\nclass Mine"))
    as_in_a_new_process()
    do([mine], table_sites, tmp_path / "results")


def test_a_fold_of_other_code_is_refused(tmp_path: Path, write: Callable[[str], None]) -> None:
    files = write_table_sites(tmp_path / "sites", THREE)
    method = sys.modules["meanwhile"].Mine(lr=0.05)
    job = replace(small_job(rounds=1), components={}, method=method)
    fold = make_folds(job, files, 1).runs[0]
    write(MINE.replace('site.fit("model")', "pass"))
    as_in_a_new_process()
    with pytest.raises(ConfigError, match="the code of the method, the task or MedPFL is not the one that this run"):
        fold_without_anna(fold, files, tmp_path)


def test_a_process_that_imported_other_code_plans_nothing(
    tmp_path: Path, table_sites: dict[str, Path], write: Callable[[str], None]
) -> None:
    """In a notebook a second comparison, after the method's file was written anew, read the runs of the code of before
    as its own, and did the others with the new one."""

    def digests() -> dict[str, str]:
        return {run.name: run.digest for run in plan_of(tmp_path, table_sites, methods=METHODS).runs}

    first = digests()
    write(MINE + "# the same\n")
    assert digests() == first
    write(MINE.replace('site.fit("model")', "pass"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"meanwhile has changed since it was imported here.* restart the kernel"):
            digests()
    importlib.reload(sys.modules["meanwhile"])
    assert [name for name, digest in digests().items() if first[name] != digest] == ["Mine"]


def fold_without_anna(fold: Fold, files: dict[str, Path], folder: Path) -> None:
    assert fold.without == "anna"
    run_fold(fold.order.model_copy(update={"site_files": {site: str(path) for site, path in files.items()}}), folder)


@pytest.mark.parametrize("changed", THREE)
def test_a_fold_looks_at_the_data_of_all_hospitals(tmp_path: Path, changed: str) -> None:
    """Of those that train it did not: a fold of other data was kept as one of those that were there at first."""
    files = write_table_sites(tmp_path / "sites", THREE)
    fold = make_folds(small_job(rounds=1), files, 1).runs[0]
    table = tmp_path / "sites" / f"{changed}.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(ConfigError, match=f"{changed}'s data or split changed while the folds were running"):
        fold_without_anna(fold, files, tmp_path)


def test_a_fold_looks_at_the_checkpoints(tmp_path: Path) -> None:
    """Those of the left out hospital count for nothing, but the run's name covers them."""
    files = write_table_sites(tmp_path / "sites", THREE)
    known = tmp_path / "known.safetensors"
    for path in files.values():
        path.write_text(f"{path.read_text()}checkpoints: {{known: {known}}}\n")
    store.save(known, {"weight": torch.zeros(2)}, {"kind": CHECKPOINT})
    begun = small_job(rounds=1, mixers={}, method=SoftPull(lr=0.05, start=Start("known")))
    fold = make_folds(begun, files, 1).runs[0]
    store.save(known, {"weight": torch.ones(2)}, {"kind": CHECKPOINT})
    with pytest.raises(
        ConfigError, match="anna's network, checkpoints or public data changed while the folds were running"
    ):
        fold_without_anna(fold, files, tmp_path)
