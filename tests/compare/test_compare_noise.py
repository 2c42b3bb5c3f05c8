# SPDX-License-Identifier: Apache-2.0
"""A comparison of methods with noise says what the noise has cost."""

from pathlib import Path

import pytest

from comparing import SOFT, compared
from medpfl.compare.comparison_tables import PRIVACY, markdown, privacy
from medpfl.compare.report import write_report
from medpfl.results.files import read_training


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_tables_have_each_hospitals_epsilon(table_sites: dict[str, Path], tmp_path: Path) -> None:
    noise = {"path": "medpfl.privacy.ClippedNoise", "args": {"clip": 1.0, "noise_multiplier": 2.0}}
    noisy = {**SOFT, "args": {"privacy": noise}}
    plan, content = compared(tmp_path, table_sites, seeds=[0, 1], methods={"noisy": noisy, "plain": SOFT})
    head, lines = privacy(content)
    assert head == ["method", "level", "delta", *sorted(table_sites)]
    assert {line[0] for line in lines} == {"noisy", "noisy (personal_before_pull)"}
    line = next(line for line in lines if line[0] == "noisy")
    assert line[:3] == ["noisy", "update", "1e-05"]
    told = [
        read_training(tmp_path / "results" / "runs" / run.digest / "results").privacy
        for run in plan.runs
        if run.name == "noisy"
    ]
    assert len(told) == 2
    for site, shown in zip(head[3:], line[3:], strict=True):
        assert shown == f"{max(one[site].epsilon for one in told):.3f}" != "0.000"
    assert f"## {PRIVACY}" in markdown(content)
    assert PRIVACY in write_report(content, tmp_path, []).read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_without_noise_there_is_no_such_table(table_sites: dict[str, Path], tmp_path: Path) -> None:
    _, content = compared(tmp_path, table_sites, methods={"plain": SOFT})
    assert privacy(content)[1] == []
    assert PRIVACY not in markdown(content) and PRIVACY not in write_report(content, tmp_path, []).read_text()
