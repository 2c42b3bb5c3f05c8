# SPDX-License-Identifier: Apache-2.0
"""Mutated replies, requests and state files: the quick share of ``python -m benchmarks fuzz``."""

import json
from typing import Any

import pytest
from nvflare.apis.shareable import Shareable

from benchmarks import fuzz
from medpfl.flare.wire import to_shareable


def test_no_mutation_gets_through_or_raises_another_error() -> None:
    found = fuzz.run(500, seed=1)
    assert found.faults == [] and found.tried == 500
    assert found.outcomes["accepted"] and found.outcomes["ProtocolError"] and found.outcomes["RefusedUpdate"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("round", 2), ("notes", ["a\nb"]), ("metrics", [{"model": "x"}]), ("loss", {"personal": 1e300})],
)
def test_the_oracle_tells_sound_from_unsound(field: str, value: Any) -> None:
    """An attempt that is not mutated is accepted; one with a fault in it is not."""
    asked, honest = fuzz._pairs()[1]
    sent: Shareable = to_shareable(honest)
    said = json.loads(sent["DXO"]["meta"]["medpfl"])
    said["content"][field] = value
    sent["DXO"]["meta"]["medpfl"] = json.dumps(said)
    found = fuzz.Found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "_mutated", lambda rng, shareable: sent)
        fuzz._try(fuzz._reply(fuzz.random.Random(0), asked, honest), 0, found)
    assert found.faults == [] and found.outcomes["accepted"] == (field == "round")
