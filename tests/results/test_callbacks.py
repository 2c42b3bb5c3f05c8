# SPDX-License-Identifier: Apache-2.0
"""Callbacks: a tracker from another package, in one file, hears of rounds and metrics; one that fails harms nobody."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ledger import Ledger
from medpfl.core.errors import MedPFLError
from medpfl.job import Job
from medpfl.results.callbacks import Callback, RoundEnd
from medpfl.results.files import read_lines, read_summary
from medpfl.results.schema import ValidationLine
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate


class Broken(Callback):
    """A tracker whose server is away."""

    def __init__(self) -> None:
        self.asked = 0

    def on_round_end(self, end: RoundEnd) -> None:
        self.asked += 1
        raise ConnectionError("no route to the tracking server")


@pytest.mark.slow
def test_a_tracker_of_another_package_sees_rounds_and_metrics(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    ledger = Ledger()
    simulate(make_job(rounds=3), table_sites, tmp_path / "results", tmp_path / "home", trackers=[ledger])
    assert ledger.rounds == [1, 2, 3] and ledger.ended and ledger.slots == {"fedavg", "model"}
    summary = read_summary(tmp_path / "results")
    means = {
        (line.model, line.round): line.metrics["accuracy"]
        for line in read_lines(tmp_path / "results")
        if isinstance(line, ValidationLine) and line.site == "mean"
    }
    assert ledger.scores == means and {n for _, n in means} == {1, 2, 3}
    assert ledger.tests == len(summary.test) > 0


@pytest.mark.slow
def test_after_a_resume_it_hears_of_all_rounds(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job, whole, again = make_job(rounds=3), Ledger(), Ledger()
    simulate(job, table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    simulate(job, table_sites, tmp_path / "b", tmp_path / "home", trackers=[again])
    simulate(job, table_sites, tmp_path / "c", tmp_path / "other", trackers=[whole])
    assert again.rounds == [2, 3] and again.scores == whole.scores


@pytest.mark.slow
def test_a_tracker_that_fails_is_told_no_more_and_the_job_goes_on(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    broken, ledger = Broken(), Ledger()
    simulate(make_job(rounds=3), table_sites, tmp_path / "r", tmp_path / "home", trackers=[broken, ledger])
    assert broken.asked == 1 and ledger.rounds == [1, 2, 3]
    (event,) = read_summary(tmp_path / "r").events
    assert event.event == "the tracker Broken failed and is told no more: no route to the tracking server"
    assert (event.round, event.site) == (1, "server")


def test_a_job_that_fails_is_told_too(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job, ledger = make_job(), Ledger()
    coordinator = Coordinator(job, list(table_sites), tmp_path / "s", tmp_path / "r", [ledger])
    coordinator.record.fail("too few hospitals answered")
    assert ledger.failed == "too few hospitals answered"
    assert "too few hospitals" in (tmp_path / "r" / "failure.json").read_text()


def test_a_results_folder_that_cannot_be_written_fails_the_job(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "r").write_text("a file")
    with pytest.raises(MedPFLError, match="cannot write the results folder"):
        simulate(make_job(), table_sites, tmp_path / "r", tmp_path / "home")
