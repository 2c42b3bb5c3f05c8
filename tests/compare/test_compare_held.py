# SPDX-License-Identifier: Apache-2.0
"""What all hospitals hold alike, checkpoints and public data, is part of what names a run."""

from pathlib import Path

import pytest
import torch
import yaml

from comparing import SOFT, do, plan_of
from medpfl import store
from medpfl.compare.runs import Run
from medpfl.core.errors import ConfigError
from medpfl.data.site_file import CHECKPOINT

ON_PUBLIC = {"path": "medpfl.methods.fedmd.FedMD", "args": {"public": "shared"}}
ON_CHECKPOINT = {"path": "medpfl.methods.fedap.FedAP", "args": {"pretrained": "known", "batch_norm": "shared"}}


def share(sites: dict[str, Path], text: str) -> None:
    """Declare the same public rows at every hospital."""
    for path in sites.values():
        content = yaml.safe_load(path.read_text())
        (path.parent / "shared.csv").write_text(text)
        content["datasets"]["shared"] = {**content["datasets"]["blood"], "files": ["shared.csv"], "public": True}
        path.write_text(yaml.safe_dump(content))


def by_name(runs: list[Run]) -> dict[str, str]:
    return {run.name: run.digest for run in runs}


@pytest.mark.slow
def test_other_public_data_make_other_runs_of_the_methods_that_use_them(
    tmp_path: Path, table_sites: dict[str, Path]
) -> None:
    rows = (table_sites["anna"].parent / "anna.csv").read_text()
    methods = {"Soft": SOFT, "FedMD": ON_PUBLIC}
    share(table_sites, rows)
    plan = plan_of(tmp_path, table_sites, methods=methods)
    assert by_name(plan_of(tmp_path, table_sites, methods=methods).runs) == by_name(plan.runs)
    share(table_sites, rows.replace(".1", ".2"))
    again = by_name(plan_of(tmp_path, table_sites, methods=methods).runs)
    assert [name for name, digest in by_name(plan.runs).items() if again[name] != digest] == ["FedMD"]
    (mine,) = [run for run in plan.runs if run.name == "FedMD"]
    with pytest.raises(ConfigError, match="anna's checkpoints or public data changed while the comparison was running"):
        do([mine], table_sites, tmp_path / "results")


def test_another_checkpoint_of_a_method_makes_other_runs_of_it(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    known = tmp_path / "known.safetensors"
    for path in table_sites.values():
        path.write_text(f"{path.read_text()}checkpoints: {{known: {known}}}\n")

    def digests(value: float) -> dict[str, str]:
        store.save(known, {"weight": torch.full((2,), value)}, {"kind": CHECKPOINT})
        return by_name(plan_of(tmp_path, table_sites, methods={"FedAP": ON_CHECKPOINT}).runs)

    before, after = digests(1.0), digests(2.0)
    assert before == digests(1.0)
    assert [name for name in before if before[name] != after[name]] == ["FedAP"]
