# SPDX-License-Identifier: Apache-2.0
"""Of several hospitals in one process one refuses: its sentence says which, for all of them say "this hospital"."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from medpfl.core.errors import PolicyRefused
from medpfl.job import EvaluationJob, load_job, write_evaluation_job
from medpfl.rounds.simulate import simulate, simulate_evaluation
from small_jobs import small_job

LATER: list[tuple[dict[str, Any], str]] = [
    ({"least_scored": 100}, r"^clara: this hospital's policy \('least_scored'\) asks for at least 100 scored cases"),
    (
        {"kept_here": ["train losss"]},
        r"^clara: this hospital's policy \('kept_here'\) names .*; did you mean 'train loss'",
    ),
]


@pytest.mark.parametrize(("policy", "said"), LATER)
def test_a_refusal_says_whose_it_is(
    policy: dict[str, Any], said: str, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Of an evaluation it did not, nor of a line in 'kept_here' with a slip in it: which of the site files to open was
    a guess."""
    simulate(small_job(1), table_sites, tmp_path / "results", tmp_path / "home")
    model = tmp_path / "home" / "anna" / "small" / "models" / "fedavg-best.safetensors"
    evaluation = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    assert isinstance(evaluation, EvaluationJob)
    content = yaml.safe_load(table_sites["clara"].read_text())
    table_sites["clara"].write_text(yaml.safe_dump({**content, "policy": policy}))
    with pytest.raises(PolicyRefused, match=said):
        simulate_evaluation(evaluation, table_sites, tmp_path / "tested", tmp_path / "there")
    with pytest.raises(PolicyRefused, match=said):
        simulate(small_job(2), table_sites, tmp_path / "results", tmp_path / "home")
