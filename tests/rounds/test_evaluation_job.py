# SPDX-License-Identifier: Apache-2.0
"""A job that only evaluates: what it holds, what it finds, what stays at the hospitals, and what it refuses."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from medpfl import store
from medpfl.core.errors import ConfigError, DataError, MedPFLError, RefusedUpdate
from medpfl.core.mixers import SoftPull
from medpfl.data.site_file import load_site_file
from medpfl.deployed.evaluate import evaluate
from medpfl.deployed.model_file import ModelMeta, load_deployed
from medpfl.job import EvaluationJob, Job, load_job, write_evaluation_job
from medpfl.job.names import MODEL_FILE
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.results.files import read_summary
from medpfl.results.schema import EvaluationSummary
from medpfl.results.tables import result_table
from medpfl.results.terminal_table import print_results
from medpfl.rounds.evaluation import EvaluationCoordinator, method_of
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import StatisticsReply
from medpfl.rounds.server.quorum import QuorumLost
from medpfl.rounds.simulate import simulate_evaluation
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.tabular import Tabular
from small_jobs import write_table_sites
from tools import retell, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The personal model of one of two hospitals that trained together."""
    folder = tmp_path_factory.mktemp("trained")
    sites = write_table_sites(folder / "sites", ["anna", "berta"])
    mixers = {"model": SoftPull(lam=0.5)}
    job = Job("small", 2, Settings(rounds=3, references=()), mixers, softpull.SoftPull(lr=0.05), Tabular("blood"))
    run(job, sites, folder)
    return folder / "home" / "berta" / "small" / "models" / "personal-best.safetensors"


@pytest.fixture
def job(model: Path, tmp_path: Path) -> EvaluationJob:
    found = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    assert isinstance(found, EvaluationJob)
    return found


@pytest.mark.slow
def test_it_finds_what_the_model_does_at_each_hospital(
    model: Path, job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Two of the four hospitals took no part in its training."""
    simulate_evaluation(job, table_sites, tmp_path / "results", tmp_path / "home")
    summary = read_summary(tmp_path / "results")
    assert isinstance(summary, EvaluationSummary)
    deployed = load_deployed(model)
    assert [line.site for line in summary.test] == sorted(table_sites)
    for line in summary.test:
        site = line.site
        samples = deployed.task.load(load_site_file(table_sites[site], site)).splits["test"]
        found = evaluate(deployed.method, deployed.name, deployed.networks, deployed.task, samples, torch.device("cpu"))
        assert found and found.metrics == line.metrics
        kept = tmp_path / "home" / site / job.name / "evaluation"
        with open(kept / "personal.csv", newline="") as file:
            assert [row["case"] for row in csv.DictReader(file)] == samples.names
        card = (kept / "personal.md").read_text()
        assert f"tested at {site}" in card and f"{found.metrics['accuracy']:.4f}" in card and "Brier" in card
        assert "Not a medical device" in card and summary.evaluated.sha256 in card
        assert {path.name for path in kept.parent.iterdir()} == {"evaluation"}  # the model itself is not kept


def test_the_job_tells_nothing_of_the_hospital_that_made_the_model(model: Path, job: EvaluationJob) -> None:
    folder = job.model.parents[2]
    assert folder.name == job.name == "evaluate-personal"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    config = {f"app/config/{name}" for name in ("config_fed_server.json", "config_fed_client.json", MODEL_FILE)}
    assert names == {"meta.json", *config}
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for word in (b"berta", b"anna", b'accuracy":', b"cases", b"small", b"preparation"):
                assert word not in content, path
    assert load_deployed(job.model).meta.history is None
    assert store.fingerprint(store.read(job.model)[0]) == store.fingerprint(store.read(model)[0])
    assert write_evaluation_job(model, folder.parent, "second").name == "second"


def test_the_report_and_the_table_show_one_model_and_no_rounds(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate_evaluation(job, table_sites, tmp_path / "results", tmp_path / "home")
    summary = read_summary(tmp_path / "results")
    assert isinstance(summary, EvaluationSummary)
    table = result_table(summary)
    assert table.labels == ["Accuracy", "Balanced accuracy", "Auc"] and table.sites == sorted(table_sites)
    page = (tmp_path / "results" / "report.html").read_text()
    print_results(tmp_path / "results", Console(width=120))
    printed = capsys.readouterr().out
    for text in (page, printed):
        assert "test cases" in text and "training samples" not in text and "best round" not in text
        for site, row in zip(table.sites, table.values, strict=True):
            assert site in text and all(f"{value:.3f}" in text for value in row)
    assert "nothing trained" in page and "Who learnt from whom" not in page and "<svg" not in page
    assert "rounds" not in page and summary.evaluated.sha256 in page
    received = json.loads((tmp_path / "results" / "bytes.json").read_text())
    size = sum(t.numel() * t.element_size() for t in store.read(job.model)[0].values())
    assert {(line["direction"], line["raw"]) for line in received} == {("to_site", size), ("from_site", 0)}


def pieces(
    job: EvaluationJob, sites: dict[str, Path], folder: Path
) -> tuple[EvaluationCoordinator, Callable[..., Any]]:
    names = list(sites)
    coordinator = EvaluationCoordinator(job.settings, job.name, names, job.min_clients, job.model, folder / "r")

    def answer(site: str, message: Message[Any]) -> Message[Any]:
        runner = SiteRunner(site, job.method, job.task, lambda: load_site_file(sites[site], site), folder / site)
        return runner.handle(message)

    return coordinator, answer


def recipe(**change: Any) -> Callable[[Message[Any]], None]:
    return lambda message: retell(message, recipe=message.header.recipe.model_copy(update=change))


def line(**change: Any) -> Callable[[Message[Any]], None]:
    return lambda message: retell(message, metrics=(message.header.metrics[0].model_copy(update=change),))


def test_a_hospital_answers_with_metrics_and_nothing_else(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, answer = pieces(job, table_sites, tmp_path)
    reply = answer("clara", coordinator.messages()["clara"])
    assert not reply.slots and reply.header.study is None
    assert set(reply.header.metrics[0].metrics) == {"accuracy", "balanced_accuracy", "auc"}
    text = reply.header.model_dump_json()
    assert "clara" not in text and ".csv" not in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.slots["given"].update({"model.0.weight": torch.zeros(1, 4)}), "expected shape [1, 3]"),
        (lambda m: m.slots["given"].pop("model.0.bias"), "entry 'model.0.bias' is missing"),
        (lambda m: m.slots.clear(), "entry 'model.0.bias' is missing"),
        (recipe(input_shape=[4]), "expected shape [1, 4]"),
        (recipe(deployed="global"), "SoftPull deploys no model 'global'"),
        (recipe(classes=["yes", "no"]), "classes are yes, no; the data here have no, yes"),
        (recipe(task={"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood", "hidden": [4]}}), "tasks"),
        (recipe(method={"path": "os.system", "args": {}}), "name different methods"),
        (lambda m: retell(m, job="../../etc"), "cannot be a folder"),
    ],
)
def test_a_hospital_refuses_a_model_that_does_not_fit(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path, spoil: Callable[[Message[Any]], Any], words: str
) -> None:
    coordinator, answer = pieces(job, table_sites, tmp_path)
    message = coordinator.messages()["anna"]
    message = Message(message.header, {s: dict(t) for s, t in message.slots.items()})
    spoil(message)
    with pytest.raises(ConfigError) as caught:
        answer("anna", message)
    assert words in str(caught.value) and caught.value.public == str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("anna/**/*"))


@pytest.mark.parametrize(
    ("spoil", "kept", "told"),
    [
        (recipe(classes=["yes", "nein"]), "init classes", "classes are yes, nein; the data here have others"),
        (recipe(meaning=["x", "y", "z"]), "init recipe", "mean something else than those of the data here"),
    ],
)
def test_what_a_policy_keeps_here_is_not_told_by_a_refusal(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path, spoil: Callable[[Message[Any]], Any], kept: str,
    told: str,
) -> None:  # fmt: skip
    """The names of a hospital's classes and features, which it keeps from every job that trains."""
    file = table_sites["anna"]
    file.write_text(file.read_text() + f"policy: {{kept_here: ['{kept}']}}\n")
    coordinator, answer = pieces(job, table_sites, tmp_path)
    message = coordinator.messages()["anna"]
    spoil(message)
    with pytest.raises(DataError) as refused:
        answer("anna", message)
    assert refused.value.public.endswith(told)


def test_the_device_is_the_one_that_the_site_file_names(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEDPFL_DEVICE")
    table_sites["dora"].write_text(table_sites["dora"].read_text() + "gpu: {device: 'cuda:99'}\n")
    with pytest.raises(ConfigError, match=r"gpu.device is 'cuda:99', but torch finds"):
        simulate_evaluation(job, table_sites, tmp_path / "r", tmp_path / "h")


def test_data_of_another_shape_are_told(job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path) -> None:
    text = table_sites["dora"].read_text().replace("c: number", "c: [1, 2, 3]")
    data = (table_sites["dora"].parent / "dora.csv").read_text().splitlines()
    rows = [",".join([*row.split(",")[:2], str(1 + i % 3), row.split(",")[3]]) for i, row in enumerate(data[1:])]
    (table_sites["dora"].parent / "dora.csv").write_text("\n".join([data[0], *rows]) + "\n")
    table_sites["dora"].write_text(text)
    with pytest.raises(ConfigError, match=r"takes inputs of shape \[3\], the data here have \[4\]"):
        simulate_evaluation(job, table_sites, tmp_path / "r", tmp_path / "h")
    (table_sites["dora"].parent / "dora.csv").write_text("a,b,sick\n1,2,0\n")
    with pytest.raises(DataError, match=r"dora\.csv: column 'c' is missing"):
        simulate_evaluation(job, table_sites, tmp_path / "r", tmp_path / "h")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (line(model="other"), "its metrics are not of the given model's test"),
        (line(split="validation"), "its metrics are not of the given model's test"),
        (line(round=3), "its metrics are not of the given model's test"),
        (line(metrics={"accuracy": 1e100}), "its accuracy of 'personal' is not between 0 and 1"),
        (line(metrics={"<b>": 0.5}), "by '<b>', which is no metric of the job's task"),
        (lambda m: retell(m, study={"test": 1}), "it sent a study, and SoftPull asks for none"),
        (
            lambda m: object.__setattr__(m, "header", StatisticsReply()),
            "it was asked to 'evaluate' and answered to 'statistics'",
        ),
        (lambda m: m.slots.update(given={"x": torch.zeros(1)}), "it sent tensors, and metrics only were asked for"),
    ],
)
def test_a_malformed_answer_is_left_out_by_name(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path, spoil: Callable[[Message[Any]], Any], words: str
) -> None:
    coordinator, answer = pieces(job, table_sites, tmp_path)
    replies = {site: answer(site, message) for site, message in coordinator.messages().items()}
    spoil(replies["berta"])
    coordinator.take(replies)
    summary = read_summary(tmp_path / "r")
    assert [line.site for line in summary.test] == ["anna", "clara", "dora"]
    assert summary.events[0].site == "berta" and words in summary.events[0].event


def test_what_the_metrics_are_is_the_servers_to_say(
    job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Of two hospitals the first one's word counted: which values are better, and in which unit."""
    two = {site: table_sites[site] for site in ("anna", "berta")}
    coordinator, answer = pieces(job, two, tmp_path)
    replies = {site: answer(site, message) for site, message in coordinator.messages().items()}
    retell(replies["anna"], measures={"accuracy": Measure(direction="lower", unit="mm")})
    coordinator.take(replies)
    summary = read_summary(tmp_path / "r")
    assert summary.metrics == job.task.measures and len(summary.test) == 2


def test_the_server_reads_a_study_with_classes_of_this_package_only(job: EvaluationJob) -> None:
    """A job's model may name any class, and importing a module runs it."""
    recipe = load_deployed(job.model).meta.recipe
    assert type(method_of(recipe)) is softpull.SoftPull
    for spec in ({"path": "nobodys.Method"}, {**recipe.method, "args": {"inner": {"path": "nobodys.Method"}}}):
        with pytest.raises(
            RefusedUpdate, match=r"reads no study of 'nobodys\.Method', which is not a class of MedPFL's"
        ):
            method_of(recipe.model_copy(update={"method": spec}))


def test_quorum_lost(job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, answer = pieces(replace(job, min_clients=2), table_sites, tmp_path)
    coordinator.refuse("berta", 0, "did not answer in time")
    with pytest.raises(QuorumLost, match=r"1 of 4 .* \(anna\); the job needs 2; berta did not answer in time"):
        coordinator.take({"anna": answer("anna", coordinator.messages()["anna"])})
    with pytest.raises(ConfigError, match="needs at least 5 hospitals, got 4"):
        simulate_evaluation(replace(job, min_clients=5), table_sites, tmp_path / "r", tmp_path / "h")


def _server(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    _json(folder / "app" / "config" / "config_fed_server.json", change)


def _client(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    _json(folder / "app" / "config" / "config_fed_client.json", change)


def _json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _model(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any], seal: bool = False) -> None:
    path = folder / "app" / "config" / MODEL_FILE
    tensors, meta = store.read(path)
    change(tensors, meta)
    if seal:
        del meta["format"]
        ModelMeta.model_validate(meta).write(path, tensors)
    else:
        store.save(path, tensors, meta)


HISTORY = {"job": "j", "site": "berta", "model": "m", "choice": "best", "round": 1, "cases": {"test": 8},
           "samples_by_class": {}, "test": {}, "calibration": None, "preparation": {}}  # fmt: skip
BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / "app" / "config" / MODEL_FILE).unlink(), "cannot read"),
    (lambda f: (f / "app" / "config" / MODEL_FILE).write_bytes(b"12345678"), "cannot read"),
    (lambda f: _model(f, lambda t, m: t.update({"model.0.bias": torch.ones(1)})), "altered after it was written"),
    (lambda f: _model(f, lambda t, m: t.update({"model.0.bias": torch.ones(2)})), "expected shape [1]"),
    (lambda f: _model(f, lambda t, m: t.update({"x": torch.ones(2)})), "entry 'x' is too many"),
    (lambda f: _model(f, lambda t, m: m.update(history=HISTORY), seal=True), "says which hospital made it"),
    (lambda f: _client(f, lambda c: c["executors"][0]["executor"]["args"]["task"]["args"].update(hidden=[2])), "tasks"),
    (lambda f: _client(f, lambda c: c["executors"][0]["executor"]["args"]["method"]["args"].update(lr=1.0)), "methods"),
    (lambda f: _server(f, lambda c: c["workflows"][0]["args"].update(rounds=3)), "unknown argument 'rounds'"),
    (lambda f: _server(f, lambda c: c["workflows"][0]["args"].update(timeout=0)), "timeout must be above 0"),
    (lambda f: _server(f, lambda c: c["workflows"][0]["args"].update(threads=0)), "threads must be at least 1"),
    (lambda f: _server(f, lambda c: c["components"].append({"id": "x"})), "a job that evaluates mixes nothing"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_job_is_found_before_it_is_submitted(job: EvaluationJob, number: int) -> None:
    spoil, words = BROKEN[number]
    folder = job.model.parents[2]
    spoil(folder)
    with pytest.raises(MedPFLError) as caught:
        load_job(folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_server_refuses_an_altered_model(job: EvaluationJob, table_sites: dict[str, Path], tmp_path: Path) -> None:
    folder = job.model.parents[2]
    _model(folder, lambda t, m: t.update({"model.0.bias": torch.ones(1)}))
    with pytest.raises(MedPFLError, match="altered after it was written"):
        pieces(job, table_sites, tmp_path)
    _model(folder, lambda t, m: m.update(history=HISTORY), seal=True)
    with pytest.raises(ConfigError, match="says which hospital made it"):
        pieces(job, table_sites, tmp_path)


def test_what_cannot_be_written(model: Path, tmp_path: Path) -> None:
    write_evaluation_job(model, tmp_path, "once")
    (tmp_path / "file").write_text("")
    for target, name, words in (
        (tmp_path, "once", "once exists already"),
        (tmp_path, "a/b", "letters, digits"),
        (tmp_path / "file", None, "cannot write"),
    ):
        with pytest.raises(MedPFLError, match=words):
            write_evaluation_job(model, target, name)
    assert {path.name for path in tmp_path.iterdir()} == {"once", "file"}


def test_metrics_that_are_not_defined_stay_so(job: EvaluationJob, tmp_path: Path) -> None:
    """A hospital whose test cases are all of one class has no AUC; the table and the card say so."""
    sites = write_table_sites(tmp_path / "one", ["anna", "berta"])
    rows = (sites["berta"].parent / "berta.csv").read_text().splitlines()
    (sites["berta"].parent / "berta.csv").write_text("\n".join([rows[0], *(row[:-1] + "0" for row in rows[1:])]) + "\n")
    simulate_evaluation(job, sites, tmp_path / "r", tmp_path / "h")
    told = {line.site: line.metrics["auc"] for line in read_summary(tmp_path / "r").test}
    assert told["berta"] is None and told["anna"] is not None
    assert "| auc | not defined |" in (tmp_path / "h" / "berta" / job.name / "evaluation" / "personal.md").read_text()
    assert "n/a" in (tmp_path / "r" / "report.html").read_text()
