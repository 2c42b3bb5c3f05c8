# SPDX-License-Identifier: Apache-2.0
"""Pooled: what it equals, what it is trained on, and how its round is chosen."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comparing import SOFT, compared, plan_of
from evaluating import evaluate_at
from medpfl import store
from medpfl.compare import pooled
from medpfl.compare.pooled import Together, train_pooled
from medpfl.compare.report import write_report
from medpfl.core.errors import ConfigError, DataError, MedPFLError, SiteFileError
from medpfl.core.mixers import Identity
from medpfl.data.declared import SPLITS
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import load_site_file
from medpfl.demo.index_lists import declare_checkpoint
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.local import Local, Pooled
from medpfl.results.schema import FinalLine, ValidationLine
from medpfl.rounds.simulate import simulate
from medpfl.tasks.metrics.contract import at_threshold, threshold_for
from medpfl.tasks.multi_label import MultiLabel
from medpfl.tasks.tabular import Tabular
from small_jobs import on_its_own, write_table_sites

TASK = Tabular(dataset="blood", hidden=(4,))
TRAINING: dict[str, Any] = {"steps": 7, "lr": 0.05, "batch_size": 8}


def job(method: Local, sites: int = 1) -> Job:
    settings = Settings(rounds=3, references=(), seed=2, finetune=0)
    return Job("compared", sites, settings, {"local": Identity()}, method, TASK)


def loaded(files: dict[str, Path]) -> dict[str, SiteData]:
    return {site: TASK.load(load_site_file(path, site)) for site, path in files.items()}


def same_models(one: Path, other: Path) -> bool:
    first, second = (load_deployed(path).networks.state_dict() for path in (one, other))
    return all(torch.equal(first[key], second[key]) for key in first) and first.keys() == second.keys()


@pytest.mark.slow
def test_with_one_hospital_it_is_local_training_bit_for_bit(tmp_path: Path) -> None:
    written = write_table_sites(tmp_path / "sites", ["pooled"])  # the batches' order depends on the hospital's name
    files = {"pooled": on_its_own(written["pooled"])}
    alone = simulate(job(Local(**TRAINING)), files, tmp_path / "alone", tmp_path / "alone-home")
    together, lines = train_pooled(job(Pooled(**TRAINING)), loaded(files), files["pooled"], tmp_path / "together")
    assert alone.best["local"] == together.best["pooled"]
    tested = [line for line in alone.record.lines if isinstance(line, FinalLine)]
    assert [line.metrics for line in tested] == [line.metrics for line in lines] and len(lines) == 2
    for choice in ("best", "last"):
        mine = tmp_path / "together" / "home" / "pooled" / "compared" / "models" / f"pooled-{choice}.safetensors"
        theirs = tmp_path / "alone-home" / "pooled" / "compared" / "models" / f"local-{choice}.safetensors"
        assert same_models(mine, theirs)
    scores = [
        [line.metrics for line in each.record.lines if isinstance(line, ValidationLine)] for each in (alone, together)
    ]
    assert scores[0] == scores[1] and len(scores[0]) == 2 * 3


def test_it_draws_classes_alike_where_the_task_does(table_sites: dict[str, Path]) -> None:
    task = dataclasses.replace(TASK, sampling="balanced")
    together = Together(task).hold(loaded(table_sites))
    samples = together.train
    drawn, wanted = (one.order(samples, torch.Generator().manual_seed(3)) for one in (together, task))
    assert torch.equal(drawn, wanted) and len(set(drawn.tolist())) < len(samples)


def test_it_holds_all_training_samples_and_scores_hospitals_alike(table_sites: dict[str, Path]) -> None:
    parts = loaded(table_sites)
    together = Together(TASK).hold(parts)
    data = together.load(load_site_file(table_sites["anna"]))
    inputs = torch.cat([part.splits["train"].inputs for part in parts.values()])
    assert torch.equal(data.splits["train"].inputs[:], inputs)
    train = data.splits["train"]
    assert train.names == [name for part in parts.values() for name in part.splits["train"].names]
    assert [train.names[k] for k in train.case] == train.names  # one row a case
    decisions = torch.rand(len(data.splits["validation"]), 2, generator=torch.Generator().manual_seed(0))
    each, start = [], 0
    for part in parts.values():
        count = len(part.splits["validation"])
        mine = decisions[start : start + count]
        each.append(TASK.evaluate(mine, part.splits["validation"]).metrics["accuracy"])
        start += count
    assert len(set(each)) > 1
    assert together.evaluate(decisions, data.splits["validation"]).metrics["accuracy"] == pytest.approx(np.mean(each))


def test_every_hospitals_validation_cases_choose_their_own_threshold(table_sites: dict[str, Path]) -> None:
    """As of every other method; one threshold for all hospitals made the round that was chosen a worse one."""
    task, truth = MultiLabel(dataset="d", score="macro_f1"), torch.tensor([[0.0], [1.0]]).repeat(4, 1)
    parts = {
        site: SiteData(
            {split: Samples(torch.zeros(8, 1), truth, np.arange(8), [f"{k}" for k in range(8)], 1) for split in SPLITS},
            ["oedema"],
        )
        for site in ("anna", "berta")
    }
    together = Together(task).hold(parts)
    validation = together.load(load_site_file(table_sites["anna"])).splits["validation"]
    decisions = torch.cat([0.1 + 0.2 * truth, 0.7 + 0.2 * truth])  # cut at 0.2 at the one, at 0.8 at the other
    metrics = at_threshold(task.watched, threshold_for(task.watched, decisions, validation))
    assert together.evaluate(decisions, validation, metrics).metrics["macro_f1"] == 1


@pytest.mark.slow
def test_in_a_comparison_it_takes_all_hospitals_steps(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    plan, content = compared(tmp_path, table_sites, pooled=True)
    entries = {entry.name: entry.method.steps for entry in plan.entries}
    assert entries == {"Local": 5, "FedAvg": 5, "Pooled": 20}
    row = next(row for row in content.rows if row.name == "Pooled")
    assert row.gain.pairs == 1 and row.bytes == {"to_site": 0, "from_site": 0}
    assert len({run.initial.digest for run in content.runs}) == 1
    run = next(run for run in plan.runs if run.name == "Pooled")
    home = tmp_path / "results" / "runs" / run.digest / "home"
    models = {site: home / site / "compared" / "models" / "pooled-best.safetensors" for site in table_sites}
    parts = loaded(table_sites)
    for site, path in models.items():
        assert same_models(path, models["anna"])
        model = load_deployed(path)
        score = evaluate_at(model, load_site_file(table_sites[site], site), "test").metrics["accuracy"]
        assert row.hospitals[site].best.mean == pytest.approx(score, abs=1e-6)
        assert model.meta.history is not None
        assert model.meta.history.cases["train"] == sum(len(part.splits["train"]) for part in parts.values())
        assert model.meta.history.cases["test"] == len(parts[site].splits["test"])
    assert sorted(path.name for path in home.iterdir()) == sorted(table_sites)  # nothing of all together is kept
    best = row.best_rounds[0]
    found = [
        evaluate_at(load_deployed(path), load_site_file(table_sites[site], site), "validation").metrics["accuracy"]
        for site, path in models.items()
    ]
    assert row.curves[0][best - 1] == pytest.approx(np.mean(found)) == pytest.approx(max(row.curves[0]))


@pytest.mark.slow
def test_with_epochs_it_passes_over_all_data_as_often(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    plan = plan_of(tmp_path, table_sites, pooled=True, steps=None, epochs=2)
    assert {entry.method.epochs for entry in plan.entries} == {2} and {
        entry.method.steps for entry in plan.entries
    } == {None}


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, table_sites: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, file = loaded(table_sites), table_sites["anna"]
    whole, lines = train_pooled(job(Pooled(**TRAINING)), parts, file, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(pooled, "simulate", functools.partial(simulate, stop_after=2))
        with pytest.raises(MedPFLError):  # it ended before there was a model
            train_pooled(job(Pooled(**TRAINING)), parts, file, tmp_path / "again")
    resumed, again = train_pooled(job(Pooled(**TRAINING)), parts, file, tmp_path / "again")
    assert any("resumed after round 2" in event.event for event in resumed.record.events)
    assert again == lines and resumed.best == whole.best
    place = Path("home", "dora", "compared", "models", "pooled-best.safetensors")
    assert same_models(tmp_path / "whole" / place, tmp_path / "again" / place)


def test_inputs_of_other_shapes_are_refused(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    parts = loaded(table_sites)
    other = {split: type(samples)(samples.inputs[:, :2], samples.targets, samples.case, samples.names)
             for split, samples in parts["berta"].splits.items()}  # fmt: skip
    parts["berta"] = SiteData(other, parts["berta"].class_names)
    with pytest.raises(ConfigError, match=r"inputs at berta have the shape \[2\], at anna \[3\]"):
        Together(TASK).hold(parts)


def test_inputs_that_mean_something_else_are_refused(table_sites: dict[str, Path]) -> None:
    file = table_sites["berta"]
    file.write_text(file.read_text().replace("a: number", "a: other").replace("b: number", "a: number"))
    file.write_text(file.read_text().replace("a: other", "b: number"))
    with pytest.raises(ConfigError, match="Pooled: berta's input 1 is 'b: number', anna's 'a: number'"):
        Together(TASK).hold(loaded(table_sites))


@pytest.mark.slow
def test_a_hospital_may_be_called_pooled(tmp_path: Path) -> None:
    files = write_table_sites(tmp_path / "sites", ["other", "pooled"])
    _, content = compared(tmp_path, files, pooled=True, rounds=1)
    row = next(row for row in content.rows if row.name == "Pooled")
    assert all(row.hospitals[site].best.mean is not None for site in files)
    assert json.loads((tmp_path / "results" / "results.json").read_text())["rows"]


@pytest.mark.slow
def test_the_page_marks_the_best_that_hospitals_can_have(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    _, content = compared(tmp_path, table_sites, pooled=True, rounds=1)
    rows = []
    for row in content.rows:
        best = row.best.model_copy(update={"mean": {"FedAvg": 0.6, "Pooled": 0.7}.get(row.name, 0.5)})
        hospitals = {site: found.model_copy(update={"best": best}) for site, found in row.hospitals.items()}
        rows.append(row.model_copy(update={"best": best, "hospitals": hospitals}))
    page = write_report(content.model_copy(update={"rows": rows}), tmp_path).read_text(encoding="utf-8")
    marked = [line for line in page.splitlines() if 'class="win"' in line]
    assert all(">FedAvg<" in line for line in marked)
    # The leaderboard stands there in four orders, the table by hospital in one for the mean and one for each hospital.
    assert [line.count('class="win"') for line in marked] == [1] * 4 + [len(table_sites)] * (1 + len(table_sites))
    assert page.count("Pooled, which real hospitals cannot have") == 1


START = {"path": "medpfl.methods.start.Start", "args": {"checkpoint": "known"}}


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).state_dict())


def declare(files: list[Path], seed: int) -> None:
    path = files[0].parent / f"known{seed}.safetensors"
    store.save(path, weights(seed), {"kind": "checkpoint"})
    declare_checkpoint(files, "known", path)


@pytest.mark.slow
def test_every_method_begins_with_the_comparisons_start_weights(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    """With a learning rate that moves no weight, what is deployed is what training began with."""
    declare([*table_sites.values()], 5)
    plan, content = compared(
        tmp_path, table_sites, pooled=True, rounds=1, steps=1, lr=1e-30, start=START, methods={"Soft": SOFT}
    )
    assert [run.name for run in plan.runs] == ["Local", "FedAvg", "Pooled", "Soft"]
    assert {run.initial.digest for run in content.runs} == {store.fingerprint(weights(5))}
    for run in plan.runs:
        models = tmp_path / "results" / "runs" / run.digest / "home" / "berta" / "compared" / "models"
        (state,) = load_deployed(next(models.glob("*-last.safetensors"))).networks.children()
        for key, tensor in weights(5).items():
            torch.testing.assert_close(state.state_dict()[key], tensor, rtol=1e-6, atol=0, msg=f"{run.name}: {key}")
    before = [run.digest for run in plan.runs]
    declare([*table_sites.values()], 6)  # other weights make other runs
    again = plan_of(
        tmp_path, table_sites, pooled=True, rounds=1, steps=1, lr=1e-30, start=START, methods={"Soft": SOFT}
    )
    assert not {run.digest for run in again.runs} & {*before}


def test_start_weights_that_cannot_be_even_are_refused(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    with pytest.raises(SiteFileError, match="asks for checkpoint 'known', which this hospital does not declare"):
        plan_of(tmp_path, table_sites, start=START)
    with pytest.raises(ConfigError, match=r"methods\.Soft\.args may not set 'start': it is the same for every method"):
        plan_of(tmp_path, table_sites, methods={"Soft": {**SOFT, "args": {"start": START}}})
    declare([*table_sites.values()], 5)
    declare([table_sites["clara"]], 6)
    with pytest.raises(DataError, match="checkpoint 'known' of clara holds other tensors than that of anna"):
        plan_of(tmp_path, table_sites, start=START)
