# SPDX-License-Identifier: Apache-2.0
"""Hospitals that wait for the others ask less often the longer they wait."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey
from nvflare.private.fed.server.server_runner import ServerRunnerConfig

from in_process import Engine, Harness, new_workspace
from medpfl.flare.asking import Asking
from small_jobs import small_job, write_table_sites


@pytest.mark.parametrize(("said", "hospitals", "least"), [(0.1, 4, 0.1), (0.1, 100, 0.5), (5.0, 4, 5.0)])
def test_the_interval_grows_with_the_exchange(said: float, hospitals: int, least: float, tmp_path: Path) -> None:
    """From what the job says, which may be more than FLARE's own, or what many hospitals let the server time for."""
    config = ServerRunnerConfig(600, said, [], {}, {})
    clients = [Client(f"hospital-{number}", "") for number in range(hospitals)]
    fl_ctx = Engine("server", new_workspace(tmp_path, "server"), {}, clients).new_context()
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(config=config), private=True, sticky=False)
    asking = Asking(fl_ctx)
    for seconds, grown in ((0, 0.0), (2, 0.05), (30, 0.75), (1e6, 2.0), (0, 0.0)):
        asking.after(seconds)
        assert config.task_request_interval == pytest.approx(max(least, grown))


@pytest.mark.slow
def test_every_exchange_tells_how_long_it_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its end, after which answers may come at once."""
    told: list[float] = []
    monkeypatch.setattr(Asking, "after", lambda self, seconds: told.append(seconds))
    rounds = 2
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    Harness(small_job(rounds), sites, tmp_path).run()
    assert told.count(0) == rounds + 3  # init, rounds, validate, finish
    assert max(told) > 0 and told[-1] == 0
