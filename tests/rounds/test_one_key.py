# SPDX-License-Identifier: Apache-2.0
"""A run whose hospitals get a new key before it goes on."""

from pathlib import Path

import pytest

from encrypted import share_key
from hospitals import change_yaml
from medpfl.core.errors import ProtocolError
from medpfl.core.mixers import SoftPull
from medpfl.privacy.keys import make_key
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.requests import TrainRequest
from tools import Make, pieces, ready, round_of


def test_a_run_is_of_one_key(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Of what the server keeps of a run that stopped, nobody with a new key can read anything: it is not taken up."""
    share_key(table_sites)
    new, _ = make_key(tmp_path / "new key")
    job, runs = make_job(encryption="ckks", mixers={"model": SoftPull(lam=0.5)}), []
    for rounds, again in ((1, False), (1, True), (0, False)):
        for file in table_sites.values() if again else ():
            change_yaml(file, lambda content: content.update(keys=str(new)))
        coordinator, runners = pieces(job, table_sites, tmp_path / "run")
        ready(coordinator, runners)
        runs.append((coordinator.run, coordinator.done))
        for number in range(1, rounds + 1):
            round_of(coordinator, runners, number)
        for piece in (coordinator, *runners.values()):
            piece.close()
    (first, _), (second, _), _ = runs
    assert runs == [(first, 0), (second, 0), (second, 1)] and first != second


def test_what_was_encrypted_does_not_go_on_in_the_clear(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """A server could name the run of an encrypted job in one that is not: what leaves would be made of its private
    parts and of its optimisers' state."""
    share_key(table_sites)
    mixers = {"model": SoftPull(lam=0.5)}
    for options in ({"encryption": "ckks"}, {}):
        coordinator, runners = pieces(make_job(mixers=mixers, **options), table_sites, tmp_path)
        ready(coordinator, runners)
        if options:
            run, begun = coordinator.run, coordinator.begun
            round_of(coordinator, runners, 1)
            for piece in (coordinator, *runners.values()):
                piece.close()
    assert coordinator.run != run
    message = coordinator.rounds.train_messages(1, ["anna"])["anna"]
    with pytest.raises(ProtocolError, match="noise or encryption than this job's"):
        runners["anna"].handle(Message(TrainRequest(run=run, begun=begun, round=2, rounds=2, best={}), message.slots))
