# SPDX-License-Identifier: Apache-2.0
"""What every test is given: examples that repeat, small hospitals, and a job for them.

Nothing large is imported here: the process that deals the tests out to others would wait for it before they start.
"""

import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from medpfl.job import Job

# A test run says the same every time. To look for new examples: pytest --hypothesis-profile=default
settings.register_profile(
    "repeatable", max_examples=50, derandomize=True, deadline=None
)  # compiling and a busy machine take time
settings.load_profile("repeatable")
# The same numbers on a machine that has a GPU, whose tests ask for it themselves (tests/gpu).
os.environ["MEDPFL_DEVICE"] = "cpu"
PAGED = ("results", "cli", "package", "harness", "simulator", "poc")
LONG = ("poc", "simulator", "harness", "slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first: federations, then the files with the most marked (not quick) tests. Processes
    take the files in this order, and at the end none is alone with a long one."""
    long = Counter(item.path for item in items if any(item.get_closest_marker(name) for name in LONG))
    items.sort(key=lambda item: (item.get_closest_marker("poc") is None, -long[item.path]))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not go through it again and again, which is a twentieth
    of the run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test draws the same numbers whatever ran before it in its process, which differs from run to run. A library
    that is not imported yet begins the same by itself (PyTorch) or is asked with seeds (NumPy)."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def render() -> Iterator[Callable[..., None]]:
    """Figures are made and not rendered, which is half of a small job's time; yields what renders them."""
    from matplotlib.figure import Figure

    def not_rendered(figure: Figure, target: Path | TextIO, **how: object) -> None:
        (target.write_text if isinstance(target, Path) else target.write)("<svg/>")

    original = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", not_rendered)
        yield original


@pytest.fixture(scope="module", autouse=True)
def _pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only some files' jobs make their page, whose figures are a fifth of a small job's time: those that say its name,
    those with every method and every option, and all in the folders that show results or run whole federations."""
    file = request.path
    if file.parent.name in PAGED or file.name.startswith("test_every_") or "report.html" in file.read_text():
        yield
        return
    from medpfl.results.callbacks import JobEnd, Report

    def not_made(page: Report, end: JobEnd) -> None:
        (page.folder / "report.html").write_text("")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "on_job_end", not_made)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_flushing() -> Iterator[None]:
    """A small job waits a quarter of its time for the disk, which matters to nobody but who pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture
def rendered(render: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at figures."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", render)


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals from a tenth of the resamples, for tests of whole jobs whose metrics score one after another."""
    monkeypatch.setattr("medpfl.tasks.metrics.certainty.FEWER", 20)


@pytest.fixture
def table_sites(tmp_path: Path) -> dict[str, Path]:
    """Four hospitals with a table each."""
    from small_jobs import write_table_sites

    return write_table_sites(tmp_path / "sites")


@pytest.fixture
def make_job() -> "Callable[..., Job]":
    """``small_job``."""
    from small_jobs import small_job

    return small_job
