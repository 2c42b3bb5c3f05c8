# SPDX-License-Identifier: Apache-2.0
"""Hospitals whose inputs mean different things do not train together, and the sentence names the feature."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hospitals import change_yaml
from medpfl.job import Job
from tools import pieces, ready

Make = Callable[..., Job]


def features(change: dict[str, Any]) -> Callable[[Any], object]:
    return lambda content: content["datasets"]["blood"].update(change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"features": {"c": "number", "b": "number", "a": "number"}},
            "dora's input 1 is 'c: number', anna's 'a: number': the same features stand in another order",
        ),
        (
            {"features": {"a": "number", "b": "number", "crp": "number"}, "rename": {"c": "crp"}},
            "dora's input 3 is 'crp: number', anna's 'c: number': the features, their categories and units must agree",
        ),
        ({"units": {"c": "mg/dl"}}, "dora's input 3 is 'c: number in mg/dl', anna's 'c: number'"),
    ],
)
def test_other_inputs_of_the_same_shape_take_no_part(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    change_yaml(table_sites["dora"], features(change))
    coordinator, runners = pieces(make_job(min_clients=3), table_sites, tmp_path)
    ready(coordinator, runners)
    assert coordinator.joined == ["anna", "berta", "clara"]
    assert any(words in each.event for each in coordinator.record.events), coordinator.record.events


def test_a_hospital_may_call_its_columns_as_it_likes(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    csv = table_sites["dora"].parent / "dora.csv"
    csv.write_text(csv.read_text().replace("a,", "Alter,", 1))
    change_yaml(table_sites["dora"], features({"rename": {"Alter": "a"}}))
    coordinator, runners = pieces(make_job(min_clients=4), table_sites, tmp_path)
    ready(coordinator, runners)
    assert coordinator.joined == ["anna", "berta", "clara", "dora"]
