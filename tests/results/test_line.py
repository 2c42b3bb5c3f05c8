# SPDX-License-Identifier: Apache-2.0
"""The line that a hospital sends of an evaluation: what it may say, and that nothing else gets through."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from medpfl.results.line import MetricLine

GOOD: dict[str, Any] = {"model": "personal", "split": "test", "round": 3, "metrics": {"dice": 1, "auc": None}}


def test_it_is_read_and_written() -> None:
    line = MetricLine.model_validate_json(json.dumps({**GOOD, "choice": "best"}))
    assert line.tested_at("anna").model_dump() == {"site": "anna", **GOOD, "choice": "best"}
    assert line.validated_at("anna").metrics == {"dice": 1.0, "auc": None}


@pytest.mark.parametrize(
    "change",
    [
        {"site": "berta"},
        {"split": "round"},
        {"split": "train"},
        {"round": -1},
        {"round": 10**400},
        {"round": "3"},
        {"round": True},
        {"model": ""},
        {"model": "x" * 201},
        {"model": "a\nb"},
        {"model": None},
        {"metrics": {"dice": 10**400}},
        {"metrics": {"dice": float("nan")}},
        {"metrics": {"dice": "good"}},
        {"metrics": {"dice": True}},
        {"metrics": {str(number): 0.0 for number in range(201)}},
        {"metrics": "very good"},
        {"choice": "the finest"},
    ],
    ids=str,
)
def test_it_says_nothing_else(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MetricLine.model_validate_json(json.dumps({**GOOD, **change}))
