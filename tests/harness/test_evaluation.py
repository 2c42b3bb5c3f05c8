# SPDX-License-Identifier: Apache-2.0
"""The evaluation job on FLARE's controller and executors: the same as in process, metrics only on the wire."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from in_process import Harness, tensors_of
from medpfl import store
from medpfl.core.mixers import Mean, ServerAdam, SoftPull
from medpfl.deployed.model_file import load_deployed
from medpfl.job import EvaluationJob, Job, load_job, write_evaluation_job
from medpfl.methods.fedsm import FedSM
from medpfl.results.files import read_summary
from medpfl.results.schema import EvaluationSummary
from medpfl.rounds.server.joint import chosen, read_result, studies_of
from medpfl.rounds.simulate import simulate_evaluation
from small_jobs import small_job
from tools import outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]


@pytest.fixture
def job(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> EvaluationJob:
    run(make_job(), table_sites, tmp_path / "trained")
    model = tmp_path / "trained" / "home" / "anna" / "small" / "models" / "personal-best.safetensors"
    found = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    assert isinstance(found, EvaluationJob)
    return found


def test_equals_simulate_and_sends_metrics_only(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    harness = Harness(job, table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    simulate_evaluation(job, table_sites, tmp_path / "simulated", tmp_path / "home")
    assert outcome(harness.results) == outcome(tmp_path / "simulated")
    assert sorted((site, task) for site, task, _ in harness.wire) == [
        (site, "evaluate") for site in sorted(table_sites)
    ]
    weights = [tensor.numpy().tobytes() for tensor in store.read(job.model)[0].values() if tensor.numel() > 2]
    for _, _, payload in harness.wire:
        assert not tensors_of(payload) and all(weight not in payload for weight in weights)
        assert b".csv" not in payload and str(tmp_path).encode() not in payload
    for site in table_sites:
        kept = Path(harness.folder, site, "medpfl", job.name, "evaluation")
        assert {path.name for path in kept.iterdir()} == {"personal.md", "personal.csv"}


def test_a_hospital_that_cannot_is_named_and_the_others_are_reported(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    table_sites["berta"].write_text(table_sites["berta"].read_text().replace("blood", "urine"))

    def script(site: str, task: str, round_number: int) -> str | None:
        return "silent" if site == "dora" else None

    job = replace(job, settings=replace(job.settings, timeout=2.0))
    harness = Harness(job, table_sites, tmp_path / "flare", script).run()
    assert harness.engine.panic is None
    summary = read_summary(harness.results)
    assert [line.site for line in summary.test] == ["anna", "clara"]
    told = {event.site: event.event for event in summary.events}
    assert told == {
        "berta": "failed: dataset 'blood' is not declared at this hospital",
        "dora": "did not answer in time",
    }


def test_too_few_answers_end_the_job_with_a_sentence(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    text = table_sites["berta"].read_text()
    for site in table_sites:
        table_sites[site].write_text(text.replace("berta", site).replace("blood", "urine"))
    harness = Harness(job, table_sites, tmp_path / "flare").run()
    assert (
        harness.engine.panic and "0 of 4 hospitals evaluated the model (none); the job needs 1" in harness.engine.panic
    )
    assert (harness.results / "failure.json").is_file()


def test_a_super_model_tells_the_thresholds_too(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Over FLARE as in process: scores and counts a threshold, and neither tensors nor cases."""
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.05)}
    run(small_job(rounds=2, mixers=mixers, method=FedSM(lr=0.05)), table_sites, tmp_path / "trained")
    model = tmp_path / "super.safetensors"
    read_result(tmp_path / "trained" / "results").write(model, None)
    job = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    assert isinstance(job, EvaluationJob)
    harness = Harness(job, table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    simulate_evaluation(job, table_sites, tmp_path / "simulated", tmp_path / "home")
    told, simulated = read_summary(harness.results), read_summary(tmp_path / "simulated")
    assert isinstance(told, EvaluationSummary) and isinstance(simulated, EvaluationSummary)
    assert told.study and told.study == simulated.study
    super_, found = chosen(
        read_result(tmp_path / "trained" / "results"), studies_of(load_deployed(model), harness.results)
    )
    assert super_.method.gamma == found.gamma and len(found.lines) == 4
    for _, _, payload in harness.wire:
        assert not tensors_of(payload)
