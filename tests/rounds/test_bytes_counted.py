# SPDX-License-Identifier: Apache-2.0
"""The bytes that a job's results tell of are those of the tensors that hospitals were sent."""

from pathlib import Path

from encrypted import share_key
from medpfl.core.mixers import SoftPull
from medpfl.rounds.messages import byte_count
from tools import Make, exchange, pieces, ready


def test_of_an_encrypted_job_each_hospital_s_bytes_are_told(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Who has not been mixed yet is sent nothing, in the first round everybody. It was told for all what the first
    hospital would be sent in the next round."""
    job = make_job(rounds=3, mixers={"model": SoftPull(lam=0.5)}, encryption="ckks")
    coordinator, runners = pieces(job, share_key(table_sites), tmp_path)
    ready(coordinator, runners)
    sent = {}
    for number, present in ((1, ["anna", "clara"]), (2, coordinator.joined), (3, ["berta", "clara"])):
        asked = coordinator.rounds.train_messages(number, present)
        sent.update({(number, site): byte_count(message.slots) for site, message in asked.items()})
        coordinator.rounds.take_train(number, exchange(runners, asked))
    last = coordinator.end.validate_messages(coordinator.joined)
    sent.update({(4, site): byte_count(message.slots) for site, message in last.items()})
    coordinator.end.take_validation(exchange(runners, last))
    told = {(one.round, one.site): one.raw for one in coordinator.record.bytes if one.direction == "to_site"}
    assert told == sent
    assert [sent[2, site] > 0 for site in ("anna", "berta", "clara", "dora")] == [True, False, True, False]
