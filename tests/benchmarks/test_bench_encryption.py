# SPDX-License-Identifier: Apache-2.0
"""Mixing under encryption equals mixing in the clear, as the stored result says of a million parameters."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.encryption import MOST_ERROR, table_of

STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "encryption.json"
WAYS = {f"{name}{absent}" for name in ("mean", "SoftPull", "FedAP") for absent in ("", ", one absent")}


def worst(network: dict[str, dict[str, dict[str, float]]]) -> float:
    assert set(network["errors"]) == WAYS
    return max(value for error in network["errors"].values() for value in error.values())


def test_a_million_parameters_are_mixed_to_one_in_a_million() -> None:
    small, large = json.loads(STORED.read_text())["networks"]
    assert small["parameters"] > 0.99e5 and large["parameters"] > 0.99e6
    assert 0 < worst(small) < MOST_ERROR and 0 < worst(large) < MOST_ERROR
    assert 13 < large["up"] < 15 and 7 < large["down"] < 9


@pytest.mark.slow
def test_measured_again_on_a_small_network(tmp_path: Path) -> None:
    out = tmp_path / "e.json"
    told = CliRunner().invoke(
        app, ["encryption", "--values", "3000", "--repeats", "1", "--out", str(out)], catch_exceptions=False
    )
    found = json.loads(out.read_text())
    (network,) = found["networks"]
    assert told.exit_code == 0 and worst(network) < MOST_ERROR and table_of(found) in told.output
