# SPDX-License-Identifier: Apache-2.0
"""A comparison of one method with several codecs: a study of communication."""

from pathlib import Path
from typing import Any

import pytest

from comparing import SOFT, compared, plan_of
from medpfl.compare.comparison_tables import cost
from medpfl.compare.report import write_report
from medpfl.compare.runs import rebuild
from medpfl.core.codecs import CER, STC, Chain, Half
from medpfl.core.errors import ConfigError
from medpfl.flare.compared import foreign_classes
from medpfl.job.codecs import Codecs
from medpfl.results.files import json_of

HALF = {"path": "medpfl.core.codecs.Half"}
CHAIN: dict[str, Any] = {
    "path": "medpfl.core.codecs.Chain",
    "args": {
        "first": {"path": "medpfl.core.codecs.CER", "args": {"gamma": 0.3}},
        "then": {"path": "medpfl.core.codecs.STC", "args": {"p": 0.1}},
    },
}
METHODS = {
    "whole": SOFT,
    "halves": {**SOFT, "codecs": {"to_site": HALF, "from_site": HALF}},
    "few": {**SOFT, "codecs": {"from_site": CHAIN}},
}


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_methods_with_codecs_are_compared(table_sites: dict[str, Path], tmp_path: Path) -> None:
    plan, content = compared(tmp_path, table_sites, methods=METHODS)
    rows = {row.name: row for row in content.rows}
    assert rows["whole"].ratio is None and rows["few"].ratio["to_site"] == 1
    for way in ("to_site", "from_site"):
        # A tiny network: what stands before the halves counts.
        assert rows["halves"].ratio[way] == pytest.approx(
            rows["whole"].bytes[way] / rows["halves"].bytes[way], rel=0.01
        )
    assert "1/" in next(line[1] for line in cost(content)[1] if line[0] == "few")
    assert "bytes a round from the hospital" in write_report(content, tmp_path, []).read_text()
    figure = (tmp_path / "figures" / "communication.svg").read_text()
    assert "mathdefault" not in figure  # the labels of the axis were the source of formulas
    assert " B<" in figure or " kB<" in figure
    assert rows["few"].made[0].codecs.startswith("Codecs(to_site=None, from_site=Chain(")
    orders = {run.name: run.order for run in plan.runs}
    assert not any("codecs" in json_of(orders[name]) for name in ("whole", "Local"))  # older runs keep their digests
    assert rebuild(orders["few"])[0].codecs == Codecs(None, Chain(CER(0.3), STC(0.1)))
    assert rebuild(orders["halves"])[0].codecs == Codecs(Half(), Half())
    assert foreign_classes(plan) == []


def test_wrong_codecs_are_refused(table_sites: dict[str, Path], tmp_path: Path) -> None:
    def refused(codecs: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            plan_of(tmp_path, table_sites, methods={"SoftPull": {**SOFT, "codecs": codecs}})

    refused({"to_site": {"path": "medpfl.core.codecs.DAdaQuant"}}, "methods.SoftPull.codecs: DAdaQuant cannot")
    refused({}, "methods.SoftPull.codecs: codecs: give one")
    refused({"up": HALF}, "unknown key 'methods.SoftPull.codecs.up'")
    refused({"to_site": {"path": "medpfl.core.mixers.Mean"}}, "to_site")
