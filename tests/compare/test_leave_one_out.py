# SPDX-License-Identifier: Apache-2.0
"""Leave one hospital out: the folds train without it, and the table says what their models do for it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from evaluating import evaluate_at
from every_method import EVERY, PICTURES, with_images
from medpfl import store
from medpfl.cli import app
from medpfl.compare.fold_table import collect, frequencies, scores
from medpfl.compare.folds import make_folds
from medpfl.compare.folds import run as run_fold
from medpfl.compare.run_results import FoldRun
from medpfl.compare.unseen import served
from medpfl.core.codecs import STC, Half
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, ServerAdam, SoftPull
from medpfl.data.site_file import CHECKPOINT, load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import evaluate_on
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedsm import FedSM
from medpfl.methods.start import Start
from medpfl.models.by_hospital import ByHospital, OwnChoice
from medpfl.models.lenet import LeNet5
from medpfl.models.resnet import ResNet
from medpfl.results.files import json_of
from medpfl.rounds.simulate import simulate
from no_workers import without_workers
from small_jobs import for_few, small_job, write_table_sites
from tools import assert_same, outcome, write_job

THREE = ["anna", "berta", "clara"]


def job() -> Job:
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.6), "selector": ServerAdam(lr=0.05)}
    found = small_job(rounds=3, mixers=mixers, method=FedSM(lr=0.05))
    return replace(found, settings=replace(found.settings, finetune=0))


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A fold equals the same job run here without the hospital, and what a process of its own makes of it; finished
    folds are kept."""
    files = write_table_sites(tmp_path / "sites", THREE)
    folder = write_job(job(), tmp_path / "job")
    out = tmp_path / "out"
    arguments = ["leave-one-out", str(folder), "--sites", str(tmp_path / "sites"), "-o", str(out), "--jobs", "2"]
    with pytest.MonkeyPatch.context() as patch:
        without_workers(patch)
        first = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    content = json.loads((out / "leave-one-out.json").read_text())
    assert content["hospitals"] == THREE and content["models"] == [
        "local",
        "fedavg",
        "fedavg_before_mean",
        "personal",
        "global",
        "super",
    ]
    text = (out / "leave-one-out.md").read_text()
    assert "| Local | " in text and "| Super | " in text and "| left out | global | anna | berta | clara |" in text
    assert "test accuracy at the hospital left out" in " ".join(first.output.split())

    there = {site: files[site] for site in ("anna", "clara")}
    alone = replace(job(), min_clients=2)
    alone = replace(alone, settings=replace(alone.settings, references=("local", "fedavg")))
    simulate(alone, there, tmp_path / "results", tmp_path / "home")
    run = next(run for run in content["runs"] if run["without"] == "berta")
    unseen = alone.task.load(load_site_file(files["berta"], "berta"))
    reached = served(tmp_path / "results", tmp_path / "home", there, unseen, choice="last")
    assert {model: json_of(row) for model, row in reached.items()} == run["rows"]
    broken = iter([True])  # the first hospital's model of the first name

    def breaks(*given: Any) -> Any:
        return SimpleNamespace(metrics={"accuracy": np.nan}) if next(broken, False) else evaluate_on(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medpfl.compare.unseen.evaluate_on", breaks)
        without = served(tmp_path / "results", tmp_path / "home", there, unseen, choice="last")
    # The mean was that of the other models: a model that broke made its method better.
    first, *others = without
    assert without[first].score is None and without[first].best is not None
    assert [without[one] for one in others] == [reached[one] for one in others]
    for site in there:
        model = load_deployed(tmp_path / "home" / site / "small" / "models" / "local-last.safetensors")
        found = evaluate_at(model, load_site_file(files["berta"], "berta"), "test")
        assert run["rows"]["local"]["models"][site] == found.metrics["accuracy"]
    each = run["rows"]["local"]["models"]
    assert run["rows"]["local"]["score"] == pytest.approx(np.mean(list(each.values())))
    assert run["rows"]["local"]["best"] == max(each.values())
    assert len(set(run["rows"]["fedavg"]["models"].values())) == 1
    assert set(run["rows"]["super"]["served"]) == {"global", "anna", "clara"}
    assert sum(run["rows"]["super"]["served"].values()) == run["cases"]

    written = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*/run.json")}
    lost = next(iter(written))
    shutil.rmtree(lost.parent)
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert again.exit_code == 0 and json.loads((out / "leave-one-out.json").read_text()) == content
    assert [path for path, when in written.items() if path.stat().st_mtime_ns != when] == [lost]


@pytest.mark.slow
def test_every_fold_has_a_digest_of_its_own_and_changes_with_the_data(tmp_path: Path) -> None:
    files = write_table_sites(tmp_path / "sites", THREE)
    runs = make_folds(job(), files, 2).runs
    assert [(run.seed, run.without) for run in runs] == [(seed, site) for seed in (0, 1) for site in THREE]
    assert len({run.digest for run in runs}) == 6
    assert [run.digest for run in make_folds(job(), files, 2).runs] == [run.digest for run in runs]
    table = (tmp_path / "sites" / "anna.csv").read_text().splitlines()
    (tmp_path / "sites" / "anna.csv").write_text("\n".join(table[:-1]) + "\n")
    assert not {run.digest for run in make_folds(job(), files, 2).runs} & {run.digest for run in runs}


def test_another_checkpoint_makes_other_folds(tmp_path: Path) -> None:
    """The same name in the job and in the site files, other weights in the file."""
    files = write_table_sites(tmp_path / "sites", THREE)
    known = tmp_path / "known.safetensors"
    for path in files.values():
        path.write_text(f"{path.read_text()}checkpoints: {{known: {known}}}\n")
    begun = replace(job(), method=FedSM(lr=0.05, start=Start("known")))

    def digests(value: float) -> set[str]:
        store.save(known, {"weight": torch.full((2,), value)}, {"kind": CHECKPOINT})
        return {run.digest for run in make_folds(begun, files, 1).runs}

    assert digests(1.0) == digests(1.0)
    assert not digests(1.0) & digests(2.0)


def folded(job: Job, files: dict[str, Path], folder: Path) -> FoldRun:
    """The first fold, done here."""
    order = make_folds(job, files, 1).runs[0].order
    folder.mkdir()
    return run_fold(order.model_copy(update={"site_files": {site: str(path) for site, path in files.items()}}), folder)


def test_a_fold_has_the_jobs_codecs(tmp_path: Path) -> None:
    """They were left out without a word: scores were those of a job that sends whole models."""
    files = write_table_sites(tmp_path / "sites")
    coded = replace(small_job(rounds=2), codecs=Codecs(to_site=Half(), from_site=STC(p=0.1)))
    assert make_folds(coded, files, 1).runs[0].digest != make_folds(small_job(rounds=2), files, 1).runs[0].digest
    folded(coded, files, tmp_path / "fold")
    there = {site: path for site, path in files.items() if site != "anna"}
    settings = replace(coded.settings, references=("local", "fedavg"), finetune=0)
    simulate(replace(coded, min_clients=3, settings=settings), there, tmp_path / "alone", tmp_path / "home")
    assert_same(outcome(tmp_path / "fold" / "results"), outcome(tmp_path / "alone"))


def test_a_fold_asks_as_few_hospitals_as_the_job(tmp_path: Path) -> None:
    """Of a share of the hospitals all were asked, and a number below theirs was refused."""
    files = write_table_sites(tmp_path / "sites")
    for name, asked in (("share", 0.5), ("number", 2)):
        found = folded(small_job(rounds=2, hospitals_per_round=asked), files, tmp_path / name)
        assert [event.event for event in found.events] == ["every round asks 2 of 3 hospitals, drawn by the seed"]


def test_filters_of_other_people_are_refused(tmp_path: Path) -> None:
    """They were left out without a word."""
    files = write_table_sites(tmp_path / "sites")
    with pytest.raises(ConfigError, match=r"filters that FLARE alone can apply \(x.Noise\)"):
        make_folds(replace(small_job(), filters=("x.Noise",)), files, 1)


def test_what_cannot_be_left_out_is_said(tmp_path: Path) -> None:
    files = write_table_sites(tmp_path / "sites", THREE)
    with pytest.raises(ConfigError, match="needs at least 3 hospitals, got 2: anna, berta"):
        make_folds(job(), {site: files[site] for site in THREE[:2]}, 1)
    with pytest.raises(ConfigError, match="--seeds must be at least 1, got 0"):
        make_folds(job(), files, 0)
    pull = replace(job(), components={**job().components, "personal": SoftPull(lam=0.4)})
    with pytest.raises(ConfigError, match=r"without anna: .*lam"):
        make_folds(pull, files, 1)


def test_the_tables() -> None:
    def run(without: str, seed: int, local: float, gamma: float) -> FoldRun:
        rows = {
            "fedavg": {"models": {}, "score": 0.5, "best": 0.5},
            "local": {"models": {}, "score": local, "best": local + 0.2},
            "super": {
                "score": 0.7, "best": 0.7, "gamma": gamma, "cases": 4,
                "served": {"global": 1, **{site: 3 for site in "ab" if site != without}},
                "points": [{"gamma": 0.0, "score": 0.8, "counts": []}],
            },
        }  # fmt: skip
        content = {"without": without, "seed": seed, "score": "dice", "cases": 4, "rows": rows, "events": []}
        return FoldRun.model_validate(content)

    content = collect([run("a", 0, 0.1, 0.5), run("b", 0, 0.3, 0.9), run("a", 1, 0.3, 0.9), run("b", 1, 0.5, 0.9)])
    head, rows = scores(content)
    assert head == ["model", "without a", "without b", "mean"]
    assert rows[0] == ["Local", "0.200 ± 0.141 (best 0.400)", "0.400 ± 0.141 (best 0.600)",
                       "0.300 ± 0.141 (best 0.500)"]  # fmt: skip
    assert rows[1] == ["FedAvg", "0.500 ± 0.000", "0.500 ± 0.000", "0.500 ± 0.000"]
    found = frequencies(content)
    assert found is not None
    assert found[1] == [["a", "0.25", "–", "0.75", "0.5, 0.9", "0.800"], ["b", "0.25", "0.75", "–", "0.9", "0.800"]]
    missing = scores(content.model_copy(update={"runs": content.runs[1:]}))[1][0]
    assert missing == ["Local", "n/a", "0.400 ± 0.141 (best 0.600)", "n/a"]  # it read "n/a (best nan)"


def test_hospitals_with_different_networks_have_no_fedavg(tmp_path: Path) -> None:
    """It was trained all the same, and no fold came to its first round: no two hospitals sent the same."""
    files = {site: for_few(with_images(tmp_path / site, 24)) for site in THREE}
    networks = ByHospital(anna=ResNet(width=2, depth=10), berta=LeNet5(), clara=ResNet(width=4, depth=10))
    job = replace(EVERY["Local"].job(rounds=1), task=replace(PICTURES, architecture=networks))
    fold = make_folds(job, files, 1).runs[0]
    order = fold.order.model_copy(update={"site_files": {site: str(path) for site, path in files.items()}})
    assert list(run_fold(order, tmp_path / "fold").rows) == ["local"]


def test_a_network_of_the_hospitals_own_choice_is_part_of_a_fold(tmp_path: Path) -> None:
    """Another network in a site file repeated no fold."""
    files = {site: for_few(with_images(tmp_path / site, 24)) for site in THREE}
    job = replace(EVERY["Local"].job(rounds=1), task=replace(PICTURES, architecture=OwnChoice()))
    text = {site: path.read_text() for site, path in files.items()}

    def digests(anna: str) -> list[str]:
        for site, path in files.items():
            network = anna if site == "anna" else "medpfl.models.lenet.LeNet5"
            path.write_text(f"{text[site]}networks: {{skin: {{path: {network}}}}}\n")
        return [fold.digest for fold in make_folds(job, files, 1).runs]

    first = digests("medpfl.models.resnet.ResNet")
    assert digests("medpfl.models.resnet.ResNet") == first
    fold = make_folds(job, files, 1).runs[0]
    assert not set(digests("medpfl.models.alexnet.AlexNet")) & set(first)
    order = fold.order.model_copy(update={"site_files": {site: str(path) for site, path in files.items()}})
    with pytest.raises(ConfigError, match="anna's network, checkpoints or public data changed while the folds were"):
        run_fold(order, tmp_path / "fold")
