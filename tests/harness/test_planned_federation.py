# SPDX-License-Identifier: Apache-2.0
"""A network that is planned when the job starts: on FLARE as in `simulate`, resumed, and refused by a sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from in_process import Harness
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.mixers import Mean
from medpfl.data.fingerprint import Fingerprint, Planned
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.start import Start
from medpfl.models.auto import Auto
from medpfl.models.dynunet import DynUNet
from medpfl.rounds.leaves import leaves_of
from medpfl.rounds.planning import as_planned
from medpfl.rounds.rehearsal import rehearse
from medpfl.rounds.server.run import ServerRun
from medpfl.rounds.simulate import simulate
from medpfl.tasks.classification import Classification
from medpfl.tasks.planning import plan
from medpfl.tasks.segmentation import Segmentation
from small_volumes import write_volume_sites
from tools import assert_same, outcome, run

pytestmark = [pytest.mark.harness, pytest.mark.slow]

TASK = Segmentation("organ", size=(16, 18, 16), architecture=Auto(features=2))
METHOD = FedAvg(batch_size=2, steps=2, lr=0.01)
Make = Callable[..., Job]


def job_of(make_job: Make, rounds: int = 2, **more: Any) -> Job:
    return make_job(rounds, {"fedavg": Mean()}, METHOD, TASK, **more)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_volume_sites(tmp_path_factory.mktemp("volumes"), sides=(17, 21))


def test_flare_plans_and_trains_as_simulate_does(make_job: Make, sites: dict[str, Path], tmp_path: Path) -> None:
    harness = Harness(job_of(make_job), sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(job_of(make_job), sites, tmp_path / "simulated"))
    summary = json.loads((harness.results / "summary.json").read_text())
    task = summary["recipe"]["task"]["args"]
    assert task["size"] == [16, 16, 16] and task["spacing"] == [2.0, 2.0, 2.0]  # 18 is no multiple of 4
    assert task["architecture"]["path"] == "medpfl.models.dynunet.DynUNet"
    assert (
        task["architecture"]["args"]["filters"] == [2, 4, 8] and summary["recipe"]["method"]["args"]["batch_size"] == 2
    )
    told_in_results = (harness.results / "summary.json").read_text()
    assert "the network was planned from 12 training volumes: patches of 16x16x16" in told_in_results
    assert not list((tmp_path / "flare").rglob("plans/*.json"))  # the run is finished
    told = [line for line in leaves_of(job_of(make_job)) if line.when == "plan"]
    assert [line.what for line in told] == ["fingerprint"] and "median shape" in told[0].meaning
    known = replace(TASK, architecture=DynUNet(filters=(2, 4, 8)), size=(16, 16, 16))
    assert not [line for line in leaves_of(make_job(1, {"fedavg": Mean()}, METHOD, known)) if line.when == "plan"]


def test_its_beginning_can_be_tried(make_job: Make, sites: dict[str, Path]) -> None:
    found = rehearse(job_of(make_job), sites)
    assert {site: sizes["train"] for site, sizes in found.sizes.items()} == {"anna": 6, "berta": 6}
    assert found.lacking is None


def test_a_resumed_run_has_the_plan_it_began_with(make_job: Make, sites: dict[str, Path], tmp_path: Path) -> None:
    expected = run(job_of(make_job), sites, tmp_path / "whole")
    simulate(job_of(make_job), sites, tmp_path / "a", tmp_path / "home", stop_after=1)
    [kept] = (tmp_path / "home").rglob("plans/*.json")
    assert Planned.model_validate_json(kept.read_text()).size == (16, 16, 16)
    hidden = {site: file.read_text() for site, file in sites.items()}
    asked = []
    original = Segmentation.plan
    try:
        Segmentation.plan = lambda self, found: asked.append(found)  # type: ignore
        simulate(job_of(make_job), sites, tmp_path / "b", tmp_path / "home")
    finally:
        Segmentation.plan = original  # type: ignore[method-assign]
    assert not asked and hidden and not list((tmp_path / "home").rglob("plans/*.json"))
    assert_same(outcome(tmp_path / "b"), expected)
    model = load_deployed(tmp_path / "home" / "anna" / job_of(make_job).name / "models" / "fedavg-best.safetensors")
    assert model.task == as_planned(METHOD, TASK, plan(_known(sites), TASK.size).told())[1]
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("{}")
    with pytest.raises(MedPFLError, match="is no plan of a network: remove it"):
        simulate(job_of(make_job), sites, tmp_path / "c", tmp_path / "home")


def test_a_run_that_is_killed_as_it_ends_leaves_no_plan(
    make_job: Make, sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was finished, and the next run took the plan as "of the unfinished run", whatever the volumes were then."""
    save = ServerRun.save

    def killed(self: ServerRun, finished: bool = False) -> None:
        save(self, finished)
        if finished:
            raise KeyboardInterrupt

    monkeypatch.setattr(ServerRun, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        simulate(job_of(make_job, 1), sites, tmp_path / "a", tmp_path / "home")
    assert not list((tmp_path / "home").rglob("plans/*.json"))


def _known(sites: dict[str, Path]) -> list[Fingerprint]:
    from medpfl.data.site_file import load_site_file
    from medpfl.data.volumes.declare import Volumes

    return [load_site_file(file).dataset("organ", Volumes).fingerprint() for _, file in sorted(sites.items())]


def test_a_hospital_with_too_few_volumes_tells_nothing(make_job: Make, sites: dict[str, Path], tmp_path: Path) -> None:
    content = yaml.safe_load(sites["berta"].read_text())
    content["policy"] = {"least_statistic": 100}
    strict = tmp_path / "berta.yaml"
    strict.write_text(yaml.safe_dump(content))
    harness = Harness(job_of(make_job), {**sites, "berta": strict}, tmp_path / "flare").run()
    assert "only 1 of 2 hospitals told what their volumes are like (anna); the job needs 2" in str(harness.engine.panic)
    assert "least_statistic" in str(harness.engine.panic)


def test_what_cannot_be_planned_is_refused(make_job: Make) -> None:
    with pytest.raises(ConfigError, match="start weights are of a known network"):
        make_job(1, {"fedavg": Mean()}, replace(METHOD, start=Start(checkpoint="x")), TASK)
    with pytest.raises(ConfigError, match="its size must be 3 lengths, the most that a patch may"):
        Segmentation("organ", size=(16, 16), architecture=Auto())
    with pytest.raises(ConfigError, match="Classification has no network that could be planned"):
        Classification("organ", size=(16, 16), architecture=Auto()).plan([])
    told = Planned(
        spacing=(1, 1, 1), size=(64, 64, 64), batch_size=2, strides=((2, 2, 2),) * 2, kernels=((3, 3, 3),) * 3
    )
    with pytest.raises(ConfigError, match=r"patch \[64, 64, 64\] is larger than the job's size \[16, 18, 16\]"):
        as_planned(METHOD, TASK, told)
    with pytest.raises(ConfigError, match="there is no plan"):
        as_planned(METHOD, TASK, None)
    known = replace(TASK, architecture=DynUNet(filters=(2, 4, 8)), size=(16, 16, 16))
    with pytest.raises(ConfigError, match="is not to be planned"):
        as_planned(METHOD, known, told)
