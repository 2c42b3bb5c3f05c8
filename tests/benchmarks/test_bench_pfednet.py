# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of pFedNet's parts measure what they say: the ways they compare end at the same place."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.prox import algorithm_4
from medpfl.core import graph as graphs
from medpfl.core.network_lasso import solve_stack


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_bench_prox(tmp_path: Path) -> None:
    out = tmp_path / "prox.json"
    told = bench("prox", "--sites", "8", "--values", "5000", "--repeats", "1", "--out", str(out))
    found = json.loads(out.read_text())
    assert found["error_bound"] <= 1e-6
    assert found["objective"]["exact"] == pytest.approx(found["objective"]["paper"], rel=1e-5)
    assert "8 models of 5000 float32" in told and set(found["seconds"]) >= {"one read", "one mix", "the update"}


def test_both_ways_of_writing_the_papers_admm_agree() -> None:
    start = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    edges = graphs.complete(6)
    ours = solve_stack(start, edges, 0.5, 2, tolerance=0.0, iterations=50)
    torch.testing.assert_close(ours, algorithm_4(start, edges, 0.5), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_bench_codecs(tmp_path: Path) -> None:
    out = tmp_path / "codecs.json"
    told = bench("codecs", "--values", "20000", "--repeats", "1", "--out", str(out))
    found = json.loads(out.read_text())
    assert found["codecs"]["fp16"]["ratio"] == pytest.approx(2, abs=0.01)
    assert found["codecs"]["STC, p = 0.01"]["ratio"] > 150
    assert found["cer_admm"]["exact_objective"] <= found["cer_admm"]["admm_objective"] * (1 + 1e-12)
    assert found["cer_admm"]["exact_objective"] == pytest.approx(found["cer_admm"]["admm_objective"], rel=1e-3)
    assert list(found["cer_lengths"]["noise"]) == ["200", "2000", "20000"] and "Linear:" in told
