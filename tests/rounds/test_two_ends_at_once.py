# SPDX-License-Identifier: Apache-2.0
"""Two runs of a job of one name, with different seeds, that come to their ends at a hospital at the same moment."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medpfl.job import Job
from medpfl.rounds.hospital.choosing import Holding
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message
from tools import exchange, pieces, ready, round_of

Make = Callable[..., Job]


def at_its_end(job: Job, sites: dict[str, Path], folder: Path) -> tuple[SiteRunner, Message[Any]]:
    """The first hospital of a run of one round, and the last request to it."""
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    coordinator.end.take_validation(exchange(runners, coordinator.end.validate_messages(list(sites))))
    first = min(sites)
    return runners[first], coordinator.end.finish_messages([first])[first]


@pytest.mark.slow
def test_each_has_a_models_folder_of_its_own(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second moved the folder away in which the first wrote on, whose models then lay among its own."""
    sites = dict(sorted(table_sites.items())[:2])
    one, another = (at_its_end(make_job(rounds=1, seed=seed), sites, tmp_path) for seed in (1, 2))
    test, under_way, go_on = Holding.test, threading.Event(), threading.Event()

    def waiting(holding: Holding, *arguments: Any) -> Any:
        line = test(holding, *arguments)
        if not under_way.is_set():
            under_way.set()
            assert go_on.wait(60)
        return line

    monkeypatch.setattr(Holding, "test", waiting)
    ends = [threading.Thread(target=runner.handle, args=(message,)) for runner, message in (one, another)]
    ends[0].start()
    assert under_way.wait(60)
    ends[1].start()
    ends[1].join(2)  # it would be over
    go_on.set()
    for end in ends:
        end.join(60)
    home = one[0].ready.home
    (earlier,) = home.glob("models-*")
    assert {path.name for path in earlier.iterdir()} == {path.name for path in (home / "models").iterdir()}
