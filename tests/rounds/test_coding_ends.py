# SPDX-License-Identifier: Apache-2.0
"""A job with codecs that is killed ends as one that was not: when its rounds are over, and after a missed round."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medpfl.core.codecs import STC, DAdaQuant
from medpfl.core.errors import CodecError
from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedavg import FedAvg
from medpfl.rounds.coders import Link
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.loop import carry, training
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import Reply
from medpfl.rounds.protocol.requests import Request, TrainRequest
from medpfl.rounds.server.coordinator import Replies
from medpfl.rounds.simulate import simulate
from tools import assert_same, outcome, pieces

Make = Callable[..., Job]


class Killed(Exception):
    """The server's process and the hospitals'."""


def carried(job: Job, sites: Mapping[str, Path], folder: Path, killed: str = "") -> dict[str, Any]:
    """A whole job in this process; ``killed``: at this task, once the hospitals have answered."""
    assert job.codecs is not None
    coordinator, runners = pieces(job, dict(sites), folder)
    links = {site: Link(job.codecs, folder / "s", folder / site, site) for site in sites}

    def deliver(exchange: Any) -> Replies:
        replies: dict[str, Message[Any]] = {}
        for site, message in exchange.messages.items():
            replies[site] = links[site].carry(message, runners[site].handle)
            if message.header.task == killed and len(replies) == len(exchange.messages):
                raise Killed
        return replies

    try:
        carry(training(coordinator), deliver)
    finally:
        for runner in runners.values():
            runner.close()
    return outcome(folder / "r")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["validate", "finish"])
def test_a_job_that_is_killed_in_its_end_ends_as_one_that_was_not(
    task: str, make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    sites = dict(sorted(table_sites.items())[:2])
    job = replace(make_job(rounds=3), codecs=Codecs(STC(0.2), STC(0.2)))
    whole = carried(job, sites, tmp_path / "whole")
    with pytest.raises(Killed):
        carried(job, sites, tmp_path / "killed", task)
    assert_same(whole, carried(job, sites, tmp_path / "killed"))


@pytest.mark.parametrize(
    ("missed", "codecs"),
    [(1, Codecs(STC(0.2), STC(0.2))), (2, Codecs(None, DAdaQuant(1)))],
    ids=["STC, the first", "DAdaQuant, the second"],
)
def test_a_job_that_is_killed_after_a_hospital_missed_a_round_ends_as_one_that_was_not(
    missed: int, codecs: Codecs, make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """After the first round it was sent the whole model instead of the encoded difference to its start weights; after
    another one, DAdaQuant rounded otherwise."""
    handle = SiteRunner.handle

    def away(runner: SiteRunner, message: Message[Request]) -> Message[Reply]:
        if runner.name == "berta" and isinstance(message.header, TrainRequest) and message.header.round == missed:
            raise CodecError("away")
        return handle(runner, message)

    monkeypatch.setattr(SiteRunner, "handle", away)
    sites = dict(sorted(table_sites.items())[:3])
    method = FedAvg(lr=0.05, batch_size=8)
    job = replace(make_job(rounds=missed + 2, mixers={"fedavg": Mean()}, method=method), codecs=codecs)
    simulate(job, sites, tmp_path / "whole", tmp_path / "home")
    simulate(job, sites, tmp_path / "killed", tmp_path / "other", stop_after=missed)
    simulate(job, sites, tmp_path / "killed", tmp_path / "other")
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "killed"))
