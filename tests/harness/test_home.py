# SPDX-License-Identifier: Apache-2.0
"""MEDPFL_HOME: what outlives a run lies on a volume, and a job goes on from it where the kits' folders are gone."""

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply

from in_process import Harness
from medpfl.core.codecs import Half
from medpfl.flare.home import ENVIRONMENT_VARIABLE
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.results.files import read_summary
from tools import assert_same, outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]


def test_a_job_resumes_from_the_volume_alone(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers of FLARE's launchers, which give a kit's folder in memory."""

    def failed(answer: Shareable) -> Shareable:
        return make_reply(ReturnCode.EXECUTION_EXCEPTION)

    def script(site: str, task: str, round_number: int) -> Callable[[Shareable], Shareable] | None:
        return failed if task == "train" and round_number == 3 else None

    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(volume))
    job = make_job(rounds=4)
    assert Harness(job, table_sites, tmp_path / "flare", script).run().engine.panic
    assert not list((tmp_path / "flare").rglob("medpfl"))
    shutil.rmtree(tmp_path / "flare")
    again = Harness(job, table_sites, tmp_path / "flare").run()
    assert again.engine.panic is None
    assert "resumed after round 2" in str(read_summary(again.results).events)
    assert_same(outcome(again.results), run(job, table_sites, tmp_path / "simulated"))
    for site in table_sites:
        assert (volume / site / "small" / "models" / "personal-best.safetensors").is_file()
    assert {path.name for path in volume.iterdir()} == {"server", *table_sites}


@pytest.mark.parametrize("codecs", [None, Codecs(Half(), Half())])
def test_a_volume_that_is_not_mounted_is_one_sentence(
    make_job: Make,
    table_sites: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codecs: Codecs | None,
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "nothing"))
    harness = Harness(replace(make_job(), codecs=codecs), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is not None
    assert f"MEDPFL_HOME must be the absolute path of a folder that is there, got '{tmp_path}" in harness.engine.panic
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("named", [True, False])
def test_nobody_else_on_the_machine_may_look_into_it(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Also where the volume, as ``mkdir`` makes one, or the kit is open to all; what its owner opens stays open."""
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o755)
    opened = min(table_sites)
    if named:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(volume))
        (volume / opened).mkdir()
        (volume / opened).chmod(0o750)
    before = os.umask(0)
    try:
        assert Harness(make_job(rounds=1), table_sites, tmp_path / "flare").run().engine.panic is None
    finally:
        os.umask(before)
    homes = list(volume.iterdir()) if named else list((tmp_path / "flare").rglob("medpfl"))
    modes = {str(home.relative_to(tmp_path)): stat.S_IMODE(home.stat().st_mode) for home in homes}
    assert len(modes) == 1 + len(table_sites)
    if named:
        assert modes.pop(f"volume/{opened}") == 0o750
    assert set(modes.values()) == {0o700}
