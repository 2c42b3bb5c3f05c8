# SPDX-License-Identifier: Apache-2.0
"""One argument swept in a comparison: every value a method of its own, and a figure."""

from pathlib import Path

import numpy as np
import pytest

from comparing import SOFT, compared, plan_of
from medpfl.compare.report import write_report
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import SoftPull
from small_jobs import write_table_sites


@pytest.mark.slow
def test_every_value_is_a_method_and_the_page_has_the_figure(tmp_path: Path) -> None:
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])
    swept = {**SOFT, "sweep": {"model.lam": [0.4, 0.7, 1.0]}}
    plan, content = compared(tmp_path, sites, methods={"Soft": swept}, seeds=[0, 1])
    lams = [entry.mixers["model"].lam for entry in plan.entries if isinstance(entry.mixers.get("model"), SoftPull)]
    assert lams == [0.4, 0.7, 1.0]
    (sweep,) = content.sweeps
    assert (sweep.method, sweep.argument) == ("Soft", "model.lam")
    assert [point.name for point in sweep.points] == [f"Soft model.lam {lam}" for lam in (0.4, 0.7, 1.0)]
    rows = {row.name: row for row in content.rows}
    assert {point.name for point in sweep.points} <= rows.keys()
    for site in sites:  # lam 1 mixes nothing
        alone, local = (rows[name].hospitals[site].last.values for name in ("Soft model.lam 1.0", "Local"))
        assert alone == local
    assert not np.allclose(rows["Soft model.lam 0.4"].curves, rows["Local"].curves)
    page = write_report(content, tmp_path).read_text(encoding="utf-8")
    assert "Soft by model.lam" in page and page.index("Soft by model.lam") < page.index("Validation by round")


def test_a_sweep_of_what_is_not_there_gets_one_sentence(tmp_path: Path) -> None:
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])
    with pytest.raises(ConfigError, match=r"methods\.Soft: there is no slot 'modell'"):
        plan_of(tmp_path, sites, methods={"Soft": {**SOFT, "sweep": {"modell.lam": [0.5, 0.6]}}})
