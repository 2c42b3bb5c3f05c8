# SPDX-License-Identifier: Apache-2.0
"""FedSM's super model on the small tables: Algorithm 2, the choice of gamma, its file, and an evaluation job of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medpfl import store
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError, DataError, MedPFLError, RefusedUpdate
from medpfl.core.mixers import Mean, ServerAdam, SoftPull
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import Deployed, load_deployed
from medpfl.deployed.predict import evaluate_on
from medpfl.job import EvaluationJob, Job, load_job, write_evaluation_job
from medpfl.methods.contract import Method
from medpfl.methods.fedsm import FedSM, FedSMEnsemble, FedSMExtra, SuperModel
from medpfl.methods.fedsm.gamma import GAMMAS, choose_gamma, read_study
from medpfl.methods.joint_study import Point, SplitStudy, Study
from medpfl.results.files import read_summary
from medpfl.results.schema import EvaluationSummary
from medpfl.rounds.loop import Watch, carry, training
from medpfl.rounds.server.joint import chosen, from_file, read_result, studies_of, study_here
from medpfl.rounds.simulate import simulate_evaluation
from medpfl.tasks.contract import Task
from medpfl.tasks.metrics.measure import Measure
from small_jobs import small_job, write_table_sites
from tools import exchange, pieces, run

Make = Callable[..., Job]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What FedSM on the four tables left at the server; nothing changes it."""
    folder = tmp_path_factory.mktemp("fedsm")
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.05)}
    run(small_job(rounds=8, mixers=mixers, method=FedSM(lr=0.05)), write_table_sites(folder / "sites"), folder)
    return folder / "results"


def written(result: Path, path: Path, gamma: float) -> Deployed:
    read_result(result).with_gamma(gamma).write(path, None)
    return load_deployed(path)


class Fixed(nn.Module):
    """A network that gives the same outputs to every input."""

    def __init__(self, outputs: list[float]):
        super().__init__()
        self.outputs = torch.tensor(outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outputs.expand(len(inputs), -1)


@pytest.mark.parametrize(
    ("gamma", "served"),
    [(0.0, 3), (0.24, 3), (0.69, 3), (0.71, 0), (1.0, 0)],
)
def test_algorithm_2(gamma: float, served: int) -> None:
    """The selector gives 0.1, 0.1, 0.7, 0.1: the third hospital's model, unless gamma is above 0.7."""
    method = SuperModel(trained=FedSM(), hospitals=("a", "b", "c", "d"), gamma=gamma)
    networks = {name: Fixed([float(index)]) for index, name in enumerate(method.networks)}
    selector = Fixed(np.log([0.1, 0.1, 0.7, 0.1]).tolist())
    found = method.predict("super", nn.ModuleDict({**networks, "selector": selector}), torch.zeros(2, 3))
    assert found.tolist() == [[served], [served]]


def test_a_selector_with_the_global_model_as_a_class_needs_no_gamma() -> None:
    """FedSM-extra: K + 1 classes, the most probable one serves."""
    method = SuperModel(trained=FedSM(), hospitals=("a", "b"), gamma=None)
    networks = {name: Fixed([float(index)]) for index, name in enumerate(method.networks)}
    for probabilities, served in (([0.5, 0.2, 0.3], 0), ([0.3, 0.3, 0.4], 2)):
        models = nn.ModuleDict({**networks, "selector": Fixed(np.log(probabilities).tolist())})
        assert method.predict("super", models, torch.zeros(1, 3)).item() == served
        with pytest.raises(ConfigError, match="has 3 classes; for 2 hospitals it needs 2: leave gamma out"):
            replace(method, gamma=0.5).predict("super", models, torch.zeros(1, 3))


def test_the_ensemble_weighs_all_models_of_every_input() -> None:
    method = SuperModel(trained=FedSMEnsemble(), hospitals=("a", "b"), gamma=None)
    networks = {name: Fixed([10.0**index]) for index, name in enumerate(method.networks)}
    models = nn.ModuleDict({**networks, "selector": Fixed(np.log([0.5, 0.2, 0.3]).tolist())})
    assert method.predict("super", models, torch.zeros(1, 3)).item() == pytest.approx(0.5 + 2 + 30)


@pytest.mark.parametrize("trained", [FedSMExtra, FedSMEnsemble])
@pytest.mark.slow
def test_selectors_with_k_plus_1_classes_from_training_to_the_file(
    trained: type[FedSMExtra], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """FedSM-extra and the ensemble: no gamma, and what the study says is what the file does."""
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.05)}
    run(small_job(rounds=2, mixers=mixers, method=trained(lr=0.05, selector_steps=5)), table_sites, tmp_path / "run")
    model = read_result(tmp_path / "run" / "results")
    assert model.method.gamma is None and model.method.ensemble == (trained is FedSMEnsemble)
    with pytest.raises(ConfigError, match="has the global model among its classes, so it takes no gamma"):
        model.with_gamma(0.5)
    model, found = chosen(model, study_here(model, table_sites))
    model.write(tmp_path / "super.safetensors", found)
    deployed = load_deployed(tmp_path / "super.safetensors")
    for line in found.lines:
        data = deployed.task.load(load_site_file(table_sites[line.hospital], line.hospital))
        assert evaluate_on(deployed, data, "test").metrics["accuracy"] == line.super_
        by_input = deployed.task.evaluate(
            deployed.task.decide(deployed(data.splits["test"].inputs[:])), data.splits["test"]
        )
        assert by_input.metrics["accuracy"] == line.super_  # a row is a case
        assert sum(line.served) == line.cases


@pytest.mark.parametrize("gamma", [-0.1, 1.1])
def test_gamma_outside_0_to_1_is_refused(gamma: float) -> None:
    with pytest.raises(ConfigError, match=r"gamma must be in \[0, 1\], got"):
        SuperModel(trained=FedSM(), hospitals=("a", "b"), gamma=gamma)


def test_it_is_a_component_and_is_never_trained(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    method = SuperModel(trained=FedSM(lr=0.1), hospitals=("a", "b"), gamma=0.5)
    assert build(json.loads(json.dumps(spec_of(method))), Method, "method") == method
    with pytest.raises(ConfigError, match="component 'model': SuperModel has no such slot"):
        run(make_job(method=replace(method, hospitals=tuple(table_sites))), table_sites, tmp_path)


@pytest.mark.slow
def test_gamma_1_is_the_global_model_and_gamma_0_the_personal_ones(
    result: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    globe, personal = (written(result, tmp_path / f"{gamma}.safetensors", gamma) for gamma in (1.0, 0.0))
    stored = {slot: store.read(result / "slots" / f"{slot}.safetensors")[0] for slot in ("global", "personal")}
    home = result.parent / "home"
    data = globe.task.load(load_site_file(table_sites["berta"], "berta"))
    there = load_deployed(home / "berta" / "small" / "models" / "global-last.safetensors")
    assert evaluate_on(globe, data, "test") == evaluate_on(there, data, "test")
    for key, tensor in globe.networks["global"].state_dict().items():
        assert torch.equal(tensor, stored["global"][f"*::global.{key}"])
    for index, site in enumerate(sorted(table_sites)):
        for key, tensor in personal.networks[f"personal_{index}"].state_dict().items():
            assert torch.equal(tensor, stored["personal"][f"{site}::personal.{key}"])
    # One row a case: deciding by case is deciding by row, as in the paper.
    samples = data.splits["test"]
    assert isinstance(personal.method, SuperModel)
    by_case = personal.method.decide_cases("super", personal.networks, personal.task, samples, CPU)
    assert torch.allclose(by_case, personal.task.decide(personal(samples.inputs[:])), atol=1e-6)


@pytest.mark.slow
def test_the_study_says_what_each_threshold_would_have_done(
    result: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    model = read_result(result)
    data = model.task.load(load_site_file(table_sites["clara"], "clara"))
    found = model.method.study(model.networks, model.task, data, CPU)
    assert [point.gamma for point in found.test.points] == list(GAMMAS)
    for point in found.test.points:
        at = written(result, tmp_path / "x.safetensors", point.gamma or 0.0)
        assert point.score == evaluate_on(at, data, "test").metrics["accuracy"]
        assert sum(point.counts) == found.test.cases == len(data.splits["test"])
    first, last = found.test.points[0], found.test.points[-1]
    assert first.counts[0] == 0 and last.counts == [found.test.cases, 0, 0, 0, 0] and last.score == found.test.alone[0]


def split(cases: int, scores: list[float]) -> SplitStudy:
    points = [Point(gamma=g, score=s, counts=[cases, 0, 0]) for g, s in zip(GAMMAS, scores, strict=True)]
    return SplitStudy(cases=cases, alone=[0.5, 0.6, 0.7], points=points)


def test_gamma_has_the_best_pooled_validation_score() -> None:
    """Hospitals count by their cases, ties go to the larger gamma, and neither tests nor strangers choose."""
    count = len(GAMMAS)
    low = [0.0] * count
    first, second = [0.4] * count, [0.4] * count
    first[3], first[5], second[3] = 0.9, 0.8, 0.5
    second[5] = 0.9
    test = split(4, [1.0, *low[1:]])
    studies = {
        "a": Study(validation=split(1, first), test=test),
        "b": Study(validation=split(9, second), test=test),
        "stranger": Study(validation=split(900, [0.0] * 8 + [1.0] * (count - 8)), test=test),
    }
    found = choose_gamma(studies, ["a", "b"], Measure())
    assert found.gamma == GAMMAS[5] and found.validation == pytest.approx((0.8 + 9 * 0.9) / 10)
    assert [(line.hospital, line.own) for line in found.lines] == [("a", 0.6), ("b", 0.7), ("stranger", None)]
    tied = {"a": Study(validation=split(3, [0.7] * 6 + [0.2] * (count - 6)), test=test)}
    assert choose_gamma(tied, ["a", "b"], Measure()).gamma == GAMMAS[5]
    with pytest.raises(MedPFLError, match="no hospital has validation cases to choose gamma on"):
        choose_gamma({"a": Study(validation=None, test=test)}, ["a", "b"], Measure())
    errors = {"a": Study(validation=split(3, [0.7] * 6 + [0.2] * (count - 6)), test=test)}
    assert choose_gamma(errors, ["a", "b"], Measure(direction="lower")).gamma == GAMMAS[-1]


@pytest.mark.slow
def test_in_process_and_by_an_evaluation_job_the_same_gamma(
    result: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    model = read_result(result)
    here, found = chosen(model, study_here(model, table_sites))
    path = tmp_path / "super.safetensors"
    model.write(path, None)
    job = load_job(write_evaluation_job(path, tmp_path / "jobs"))
    assert isinstance(job, EvaluationJob)
    simulate_evaluation(job, table_sites, tmp_path / "evaluated", tmp_path / "home")
    deployed = load_deployed(path)
    there, again = chosen(from_file(deployed, path), studies_of(deployed, tmp_path / "evaluated"))
    assert there.method == here.method and again == found
    summary = read_summary(tmp_path / "evaluated")
    assert summary.test[0].metrics.keys() == {"accuracy", "balanced_accuracy", "auc"}
    other = written(result, tmp_path / "other.safetensors", 0.1)
    with pytest.raises(MedPFLError, match="not the results of an evaluation job of this super model"):
        studies_of(other, tmp_path / "evaluated")
    there.write(tmp_path / "final.safetensors", again)
    history = load_deployed(tmp_path / "final.safetensors").meta.history
    assert history is not None and history.cases["test"] == sum(line.cases for line in found.lines)
    cases = [(line.cases, line.super_ or 0.0) for line in found.lines]
    assert history.test["accuracy"] == pytest.approx(sum(n * s for n, s in cases) / sum(n for n, _ in cases), abs=1e-6)


@pytest.mark.slow
def test_a_strange_answer_about_the_thresholds_is_refused(result: Path, table_sites: dict[str, Path]) -> None:
    model = read_result(result)
    found = study_here(model, {"anna": table_sites["anna"]})["anna"]
    content = found.model_dump(mode="json")
    assert read_study("anna", content, 4) == found
    for change, words in (
        (lambda c: c["test"].update(cases=10**6), "anna: its study of the super model does not fit a model of 4"),
        (lambda c: c["test"]["points"][0].update(gamma=0.11), "does not fit a model of 4 hospitals"),
        (lambda c: c["test"]["points"][0]["counts"].append(0), "does not fit a model of 4 hospitals"),
        (lambda c: [split.update(points=[{**split["points"][0], "gamma": None}]) for split in c.values()], "not fit"),
        (lambda c: c["validation"].update(cases=10**400), r"'validation.cases': input should be less than"),
        (lambda c: c["test"]["points"][0].update(score="good"), r"'test.points.0.score': input should be"),
        (lambda c: c.update(names=["p1"]), "'names': extra inputs are not permitted"),
    ):
        broken = json.loads(json.dumps(content))
        change(broken)
        with pytest.raises(RefusedUpdate, match=words):
            read_study("anna", broken, 4)


@pytest.mark.slow
def test_a_study_of_a_score_that_cannot_be_is_left_out(
    result: Path, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One score of 1e99 decided the threshold for all."""
    written(result, tmp_path / "super.safetensors", 0.9)
    job = load_job(write_evaluation_job(tmp_path / "super.safetensors", tmp_path / "jobs"))
    assert isinstance(job, EvaluationJob)
    honest = SuperModel.study

    def study(self: SuperModel, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device) -> Study:
        found = honest(self, models, task, data, device)
        if len(data.splits["train"]) != min(rows):
            return found
        said = found.model_dump(mode="json")
        said["validation"]["points"][-1]["score"] = 1e99
        return Study.model_validate(said)

    rows = [len(read_result(result).task.load(load_site_file(file)).splits["train"]) for file in table_sites.values()]
    monkeypatch.setattr(SuperModel, "study", study)
    simulate_evaluation(job, table_sites, tmp_path / "evaluated", tmp_path / "home")
    summary = read_summary(tmp_path / "evaluated")
    assert isinstance(summary, EvaluationSummary) and "dora" not in summary.study and len(summary.study) == 3
    (told,) = summary.events
    assert told.site == "dora" and told.event.endswith("its score in the study of the model is not between 0 and 1")


@pytest.mark.slow
def test_a_result_that_was_altered_is_refused(
    result: Path, make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    result = shutil.copytree(result, tmp_path / "altered")
    summary = json.loads((result / "summary.json").read_text())
    for change, words in (
        ({"recipe": None}, "does not say how to rebuild the models; run the job again"),
        ({"roster": ["anna", "berta"]}, r"the slots do not fit the job's configuration: entry 'selector"),
        ({"roster": ["berta", "anna", "clara", "dora"]}, r"summary\.json was altered or is of another version"),
        ({"roster": ["anna", "berta", "clara", "emil"]}, "holds no model of emil; it has: anna, berta, clara, dora"),
        ({"classes": ["one"]}, r"summary\.json was altered or is of another version"),
        ({"recipe": {**summary["recipe"], "preparation": "x"}}, r"summary\.json was altered or is of another version"),
        ({"settings": {}}, r"summary\.json was altered or is of another version: 'settings.rounds' is missing"),
    ):
        (result / "summary.json").write_text(json.dumps({**summary, **change}))
        with pytest.raises(MedPFLError, match=words):
            read_result(result)
    for text, words in (("[]", "expected a JSON object, got list"), ("{", "is not a results folder: summary.json")):
        (result / "summary.json").write_text(text)
        with pytest.raises(MedPFLError, match=words):
            read_result(result)
    (result / "summary.json").write_text(json.dumps(summary))
    slot = result / "slots" / "personal.safetensors"
    content = bytearray(slot.read_bytes())
    content[-1] ^= 1
    slot.write_bytes(content)
    with pytest.raises(MedPFLError, match=r"personal\.safetensors: it was altered after the job"):
        read_result(result)
    slot.unlink()
    with pytest.raises(MedPFLError, match=r"cannot read .*personal\.safetensors: No such file"):
        read_result(result)
    (result / "summary.json").unlink()
    with pytest.raises(MedPFLError, match=r"altered: the job has not come to its end"):
        read_result(result)
    run(make_job(rounds=1), table_sites, tmp_path / "softpull")
    with pytest.raises(MedPFLError, match="SoftPull makes no super model of the hospitals' models"):
        read_result(tmp_path / "softpull" / "results")

    mixers = {"global": SoftPull(lam=0.9), "personal": SoftPull(lam=0.7), "selector": ServerAdam()}
    run(make_job(rounds=1, mixers=mixers, method=FedSM()), table_sites, tmp_path / "unmixed")
    with pytest.raises(MedPFLError, match=r"global\.safetensors: the hospitals' models differ; a super model has one"):
        read_result(tmp_path / "unmixed" / "results")


@pytest.mark.slow
def test_a_hospital_that_the_selector_does_not_know_is_refused(result: Path, table_sites: dict[str, Path]) -> None:
    files = {**table_sites, "emil": table_sites["anna"]}
    with pytest.raises(MedPFLError, match="emil is not among the selector's classes: anna, berta, clara, dora"):
        study_here(read_result(result), files)


def test_other_data_than_the_model_s_are_named(result: Path, table_sites: dict[str, Path]) -> None:
    path = table_sites["berta"]
    path.write_text(path.read_text().replace("      c: number\n", ""))
    with pytest.raises(DataError, match=r"berta: the super model takes inputs of shape \[3\] .* the data have \[2\]"):
        study_here(read_result(result), table_sites)


def test_the_common_model_stands_for_a_hospital_that_never_trained(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """What the server holds under its name are the initial weights, which would predict for patients."""
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.05)}
    job = make_job(rounds=2, mixers=mixers, method=FedSM(lr=0.05, selector_steps=2))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    without = Watch(asked=lambda number, joined: [site for site in joined if site != "berta"])
    carry(training(coordinator, without), lambda asked: exchange(runners, asked.messages))
    model = read_result(tmp_path / "r")
    assert model.untrained == ("berta",)
    common, *personal = (model.networks[name].state_dict() for name in model.method.sources() if name != "selector")
    same = [all(torch.equal(one[key], common[key]) for key in common) for one in personal]
    assert same == [False, True, False, False]


@pytest.mark.parametrize("kind", [FedSM, FedSMExtra])
def test_a_job_that_ended_early_is_not_taken_for_a_whole_one(result: Path, tmp_path: Path, kind: type[FedSM]) -> None:
    """As where the hospitals' budgets of noise were spent: the models are those of the round that was the last."""
    early = shutil.copytree(result, tmp_path / "early")
    summary = json.loads((early / "summary.json").read_text())
    summary["trained"] = {site: [[1, 2], [4, 5]] for site in summary["roster"]}
    summary["recipe"]["method"] = spec_of(kind(lr=0.05))
    (early / "summary.json").write_text(json.dumps(summary))
    if kind is FedSM:
        assert read_result(early).round == 5
    else:
        with pytest.raises(MedPFLError, match="ended after round 5 of 8, and FedSMExtra learns which model serves"):
            read_result(early)
