# SPDX-License-Identifier: Apache-2.0
"""The round loop without a transport: oracles, resuming, and what a job leaves behind."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medpfl.core.mixers import Identity, Mean, SoftPull
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.softpull import SoftPull as SoftPullMethod
from medpfl.results.files import read_summary
from medpfl.results.tables import result_table
from medpfl.rounds.simulate import simulate
from medpfl.tasks.tabular import Tabular
from tools import assert_same, outcome, run

Make = Callable[..., Job]


@pytest.mark.slow
def test_same_seed_same_bits_other_seed_other_bits(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    first = run(make_job(), table_sites, tmp_path / "1")
    assert_same(first, run(make_job(), table_sites, tmp_path / "2"))
    other = run(make_job(seed=1), table_sites, tmp_path / "3")
    assert other["scores"] != first["scores"]


@pytest.mark.slow
def test_references_change_nothing(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    with_them = run(make_job(), table_sites, tmp_path / "1")
    alone = run(make_job(mixers={"model": SoftPull(lam=0.5)}), table_sites, tmp_path / "2")
    for line in (*with_them["test"], *alone["test"]):  # a gain needs a local model beside it
        line["certainty"] = {key: line["certainty"][key] for key in ("patients", "interval")}
    assert [t for t in with_them["test"] if t["model"].startswith("personal")] == alone["test"]
    for key, tensor in alone["slots"]["model"].items():
        assert torch.equal(tensor, with_them["slots"]["model"][key])


@pytest.mark.slow
def test_lam_one_trains_exactly_as_local(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    result = run(make_job(mixers={"local": Identity(), "model": SoftPull(lam=1.0)}), table_sites, tmp_path)
    by_model: dict[str, list[Any]] = {}
    for line in result["test"]:
        by_model.setdefault(line["model"], []).append((line["site"], line["choice"], line["metrics"]))
    assert by_model["local"] == by_model["personal"]


@pytest.mark.slow
def test_lam_one_over_k_gives_everybody_one_model(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"fedavg": Mean(uniform=True), "model": SoftPull(lam=0.25)})
    slots = run(job, table_sites, tmp_path)["slots"]
    for key, tensor in slots["fedavg"].items():
        entry = key.removeprefix("*::fedavg.")
        for site in table_sites:
            owner = "*" if f"*::model.{entry}" in slots["model"] else site
            torch.testing.assert_close(slots["model"][f"{owner}::model.{entry}"], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("killed_after", [1, 2])
@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, killed_after: int
) -> None:
    whole = run(make_job(rounds=4), table_sites, tmp_path / "whole")
    simulate(make_job(rounds=4), table_sites, tmp_path / "a", tmp_path / "home", stop_after=killed_after)
    coordinator = simulate(make_job(rounds=4), table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))
    assert any("resumed after round" in event.event for event in coordinator.record.events)
    assert any("resumed from the state after round" in event.event for event in coordinator.record.events)


@pytest.mark.slow
def test_resumes_when_the_server_is_a_round_behind(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    whole = run(make_job(rounds=4), table_sites, tmp_path / "whole")
    simulate(make_job(rounds=4), table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    shutil.copytree(tmp_path / "home" / "server", tmp_path / "older")
    simulate(make_job(rounds=4), table_sites, tmp_path / "a2", tmp_path / "home", stop_after=3)
    shutil.rmtree(tmp_path / "home" / "server")
    shutil.copytree(tmp_path / "older", tmp_path / "home" / "server")  # killed before round 3 was saved
    simulate(make_job(rounds=4), table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))


@pytest.mark.slow
def test_a_finished_run_starts_fresh(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    first = run(make_job(), table_sites, tmp_path)
    coordinator = simulate(make_job(), table_sites, tmp_path / "again", tmp_path / "home")
    assert_same(first, outcome(tmp_path / "again"))
    assert not coordinator.record.events


@pytest.mark.slow
def test_another_configuration_does_not_resume(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    simulate(make_job(rounds=4), table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    for changed in (make_job(rounds=4, seed=9), make_job(rounds=4, method=SoftPullMethod(lr=0.01, batch_size=8))):
        coordinator = simulate(changed, table_sites, tmp_path / "b", tmp_path / "home", stop_after=1)
        assert coordinator.done == 1


@pytest.mark.slow
def test_a_method_may_itself_be_a_baseline(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"fedavg": Mean()}, method=FedAvg(lr=0.05, batch_size=8))
    models = {line["model"] for line in run(job, table_sites, tmp_path)["test"]}
    assert models == {"fedavg", "fedavg_before_mean", "fedavg_finetuned"}


@pytest.mark.slow
def test_same_number_of_steps_everywhere(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    from medpfl.methods.contract import Site

    taken: dict[str, int] = {}
    original = Site.step

    def counting(self: Site, *args: Any, **options: Any) -> None:
        taken[self.name] = taken.get(self.name, 0) + 1
        original(self, *args, **options)

    job = make_job(rounds=1, mixers={"model": SoftPull(lam=0.5)}, method=SoftPullMethod(steps=7, batch_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "step", counting)
        run(job, table_sites, tmp_path)
    assert taken == dict.fromkeys(table_sites, 7)


@pytest.mark.slow
def test_what_is_left_behind(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(make_job(), table_sites, tmp_path)
    folder = tmp_path / "results"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "metrics.jsonl", "mixing.npz", "bytes.json", "summary.json", "report.html",
        "slots/fedavg.safetensors", "slots/model.safetensors",
    }  # fmt: skip
    for site in table_sites:
        models = tmp_path / "home" / site / "small" / "models"
        both = ("local", "fedavg", "fedavg_before_mean", "personal", "personal_before_pull")
        stems = {f"{model}-{choice}" for model in both for choice in ("best", "last")} | {
            "fedavg_finetuned-best",
            "chosen-best",
        }
        files = {f"{s}.{e}" for s in stems for e in ("safetensors", "md", "csv")}
        assert {p.name for p in models.iterdir()} == files | {"hospital.html", ".run"}
        card = (models / "personal-best.md").read_text()
        assert "Not a medical device" in card and site in card and "SoftPull" in card


@pytest.mark.usefixtures("rendered")
@pytest.mark.slow
def test_the_report_shows_the_table(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(make_job(), table_sites, tmp_path)
    page = (tmp_path / "results" / "report.html").read_text()
    table = result_table(read_summary(tmp_path / "results"))
    assert table.labels == [
        "Local", "FedAvg", "FedAvg before the mean", "FedAvg + fine-tuning", "Personal", "Personal before pull",
    ]  # fmt: skip
    for site, row in zip(table.sites, table.values, strict=True):
        assert site in page
        for value in row:
            assert f"{value:.3f}" in page
    assert page.count("<svg") == 4  # curves, two matrices, how models differ
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?\s*(?:https?:)?//""", page)  # nothing is fetched
    assert str(tmp_path) not in page


@pytest.mark.slow
def test_saved_models_predict_what_was_reported(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    result = run(make_job(), table_sites, tmp_path)
    task = Tabular(dataset="blood", hidden=(4,))
    for site, file in table_sites.items():
        data = task.load(load_site_file(file, site))
        model = load_deployed(tmp_path / "home" / site / "small" / "models" / "personal-best.safetensors")
        found = task.evaluate(task.decide(model(data.splits["test"].inputs)), data.splits["test"])
        told = next(
            line for line in result["test"]
            if (line["site"], line["model"], line["choice"]) == (site, "personal", "best")
        )  # fmt: skip
        assert found.metrics == pytest.approx(told["metrics"])
        assert model.meta.history and model.meta.history.round == told["round"] == result["best"]["personal"]["round"]


@pytest.mark.slow
def test_the_best_round_has_the_best_mean_validation_score(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    result = run(make_job(rounds=6), table_sites, tmp_path)
    for model, best in result["best"].items():
        means: dict[int, list[float]] = {}
        for line in result["scores"]:
            if line["split"] == "validation" and line["model"] == model and line["site"] != "mean":
                means.setdefault(line["round"], []).append(line["metrics"]["accuracy"])
        assert set(means) == set(range(1, 7)) and all(len(scores) == 4 for scores in means.values())
        ranked = sorted(means, key=lambda r: (-sum(means[r]), r))
        assert best["round"] == ranked[0]


@pytest.mark.slow
def test_mixing_matrices_and_bytes_are_written_down(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    import numpy as np

    run(make_job(), table_sites, tmp_path)
    with np.load(tmp_path / "results" / "mixing.npz") as stored:
        assert sorted(stored.files) == sorted(
            ["roster", *(f"{slot}/{r:05d}" for slot in ("fedavg", "model") for r in (1, 2, 3))]
        )
        np.testing.assert_allclose(stored["model/00002"].diagonal(), 0.5)
    lines = json.loads((tmp_path / "results" / "bytes.json").read_text())
    per_model = 4 * (3 * 4 + 4 + 4 + 1)  # a 3-4-1 perceptron of float32
    assert len(lines) == 3 * 4 * 2 + 4
    assert {line["raw"] for line in lines} == {2 * per_model}  # local does not travel
    # The last round's models travel to the hospitals too.
    assert [(line["site"], line["direction"]) for line in lines if line["round"] == 4] == [
        (site, "to_site") for site in sorted(table_sites)
    ]


@pytest.mark.slow
def test_empty_validation_means_last_round(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    for file in table_sites.values():
        content = yaml.safe_load(file.read_text())
        content["datasets"]["blood"]["split"] = {"fractions": {"train": 0.7, "test": 0.3}}
        file.write_text(yaml.safe_dump(content))
    result = run(make_job(), table_sites, tmp_path)
    assert result["best"] == {}
    assert {line["round"] for line in result["test"]} == {3}


@pytest.mark.slow
def test_other_hospitals_do_not_resume_and_are_told(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    whole = run(make_job(rounds=4), table_sites, tmp_path / "whole")
    simulate(make_job(rounds=4), table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    three = {site: table_sites[site] for site in ("anna", "berta", "clara")}
    coordinator = simulate(make_job(rounds=4), three, tmp_path / "b", tmp_path / "home", stop_after=1)
    assert coordinator.done == 1
    assert "round 2; anna, berta, clara, dora) is kept and not resumed" in coordinator.record.events[0].event
    simulate(make_job(rounds=4), table_sites, tmp_path / "c", tmp_path / "home")  # and all four can still go on
    resumed = outcome(tmp_path / "c")
    assert resumed["best"] == whole["best"]


def test_an_unreadable_checkpoint_of_another_run_is_left_alone(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "home" / "server" / "small" / "state" / "broken" / "server-00001.safetensors"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"not a checkpoint")
    coordinator = simulate(make_job(), table_sites, tmp_path / "a", tmp_path / "home", stop_after=1)
    assert coordinator.record.events[0].event == "the checkpoint of run broken is unreadable and left alone"
    assert broken.read_bytes() == b"not a checkpoint"
