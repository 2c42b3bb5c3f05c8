# SPDX-License-Identifier: Apache-2.0
"""Mutated replies, requests, state files, jobs and ciphertexts: the quick share of ``python -m benchmarks fuzz``."""

import contextlib
import json
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvflare.apis.shareable import Shareable
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

from benchmarks import fuzz
from medpfl.core.errors import MedPFLError
from medpfl.flare.wire import to_shareable
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import EvaluateReply, Reply


@pytest.fixture(scope="module", autouse=True)
def serialiser() -> None:
    nvflare_fobs_initialize()


@pytest.mark.slow
def test_no_mutation_gets_through_or_raises_another_error() -> None:
    found = fuzz.run(500, seed=1)
    assert found.faults == [] and found.tried == 500
    told = ("accepted", "ProtocolError", "RefusedUpdate", "DamagedFile", "ConfigError", "CodecError")
    assert all(found.outcomes[kind] for kind in told)


def test_no_mutation_at_all_is_none_that_was_refused() -> None:
    with pytest.raises(MedPFLError, match="--count must be at least 1, got 0"):
        fuzz.run(0)


@pytest.mark.slow
@settings(max_examples=500)
@given(pair=st.sampled_from(fuzz._pairs()), rng=st.randoms(use_true_random=False))
def test_a_mutated_reply_is_refused_or_sound(pair: tuple[Message[Any], Message[Any]], rng: Random) -> None:
    """The same mutations, drawn by hypothesis, which shrinks what gets through."""
    attempt = fuzz._reply(rng, *pair)
    with contextlib.suppress(MedPFLError):  # the one family of errors
        attempt()


@pytest.mark.parametrize(
    ("field", "value"),
    [("round", 2), ("notes", ["a\nb"]), ("metrics", [{"model": "x"}]), ("loss", {"personal": 1e300})],
)
def test_the_oracle_tells_sound_from_unsound(field: str, value: Any) -> None:
    """An attempt that is not mutated is accepted; one with a fault in it is not."""
    asked, honest = fuzz._pairs()[3]
    sent: Shareable = to_shareable(honest)
    said = json.loads(sent["DXO"]["meta"]["medpfl"])
    said["content"][field] = value
    sent["DXO"]["meta"]["medpfl"] = json.dumps(said)
    found = fuzz.Found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "_mutated", lambda rng, shareable: sent)
        fuzz._try(fuzz._reply(fuzz.random.Random(0), asked, honest), 0, found)
    assert found.faults == [] and found.outcomes["accepted"] == (field == "round")


def test_every_reply_of_the_protocol_is_among_them() -> None:
    """Of a training job; an evaluation's has one line and is tried in tests/rounds/test_protocol.py."""
    kinds = {type(honest.header) for _, honest in fuzz._pairs()}
    assert kinds == set(get_args(Reply)) - {EvaluateReply}
    for asked, honest in fuzz._pairs():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fuzz, "_mutated", lambda rng, shareable: shareable)
            fuzz._reply(Random(0), asked, honest)()  # what nobody has altered is accepted
