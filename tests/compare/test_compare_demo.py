# SPDX-License-Identifier: Apache-2.0
"""``medpfl compare`` on a demo's hospitals, whose data it writes into a folder of its own."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from comparing import SOFT, write_file
from medpfl.cli import app
from medpfl.compare import comparison
from medpfl.compare.file import Comparison
from medpfl.core.errors import MedPFLError
from medpfl.demo.known import DEMOS
from small_volumes import VOLUMES, write_volume_sites

TASK = {
    "path": "medpfl.tasks.segmentation.Segmentation",
    "args": {
        "dataset": "organ",
        "size": list(VOLUMES.size),
        "spacing": [2.0, 2.0, 2.0],
        "architecture": {"path": "medpfl.models.unet.UNet", "args": {"channels": [4, 8]}},
    },
}


@pytest.mark.slow
def test_cases_are_kept_for_the_runs_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are read once before the runs; all runs read them again, here the plan does."""
    monkeypatch.setitem(DEMOS, "phantom", lambda folder: list(write_volume_sites(folder)))
    make_plan, found = comparison.make_plan, []

    def twice(comparison: Comparison, sites: dict[str, Path]) -> None:
        for _ in range(2):
            make_plan(comparison, sites)
            found.append({path: path.stat().st_ino for path in next(iter(sites.values())).parents[1].rglob("*.case")})
        raise MedPFLError("that is enough")

    monkeypatch.setattr(comparison, "make_plan", twice)
    file = write_file(tmp_path, task=TASK, demo="phantom", methods={"SoftPull": SOFT})
    with pytest.raises(MedPFLError, match="enough"):
        CliRunner().invoke(app, ["compare", str(file), "-o", str(tmp_path / "results")], catch_exceptions=False)
    assert len(found[0]) == 20 and found[0] == found[1]
    assert not any(path.exists() for path in found[0])
