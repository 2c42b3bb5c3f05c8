# SPDX-License-Identifier: Apache-2.0
"""A job asks a hospital for what its policy does not allow: one patient's gradient, a federation of one, endless or
enormous work. The hospital refuses with one sentence that tells nothing of its data."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.private.privacy_manager import Scope
from typer.testing import CliRunner

from answers import declare
from baselines import begin, play
from in_process import Engine, Harness, new_workspace
from medpfl.cli import app
from medpfl.component import build
from medpfl.core.errors import ConfigError, PolicyRefused, SiteFileError
from medpfl.core.mixers import Mean
from medpfl.core.sizes import Bounded
from medpfl.data.policy import Policy
from medpfl.data.site_file import load_site_file
from medpfl.flare.leaving import filters_out
from medpfl.job import Job, write_job
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedmd import FedMD
from medpfl.methods.fedrep import FedRep
from medpfl.methods.fedsm import FedSMPersonalised
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.pfedme import PFedMe
from medpfl.methods.site import Site
from medpfl.models.contract import Architecture
from medpfl.rounds.hospital import policy
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.requests import FinishRequest, StatisticsRequest, TrainRequest
from medpfl.tasks.multi_label import MultiLabel
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job, write_table_sites

ONE_PATIENT: dict[str, Any] = {"steps": 1, "batch_size": 1, "optimizer": "sgd"}


def sites(folder: Path, names: list[str] | None = None, **policy: Any) -> dict[str, Path]:
    files = write_table_sites(folder / "sites", names or ["anna", "berta"])
    for file in files.values():
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "policy": policy}))
    return files


def fedavg(rounds: int = 2, task: Tabular | None = None, **method: Any) -> Job:
    given = {"lr": 0.05, "batch_size": 8, **method}
    return small_job(rounds=rounds, mixers={"fedavg": Mean()}, method=FedAvg(**given), task=task, min_clients=1)


def refused(job: Job, files: dict[str, Path], folder: Path, rule: str) -> str:
    with pytest.raises(PolicyRefused, match=rf"\('{rule}'\)") as error:
        begin(job, files, folder / "run")
    assert error.value.public == str(error.value)
    return error.value.public


def test_one_patient_an_update(tmp_path: Path) -> None:
    text = refused(fedavg(**ONE_PATIENT), sites(tmp_path), tmp_path, "least_update")
    assert text.endswith("asks for at least 8 training samples behind an update, FedAvg; this job takes 1")


@pytest.mark.parametrize(
    ("rule", "policy", "method"),
    [("least_update", {"least_update": 30}, {"epochs": 1}), ("most_steps", {}, {"epochs": 100_000, "batch_size": 1})],
)
def test_a_refusal_does_not_tell_how_many_samples_there_are(
    rule: str, policy: dict[str, int], method: dict[str, int], tmp_path: Path
) -> None:
    """Who takes no part tells no sizes. What a job "takes" or "wants" by epochs is the number of samples."""
    files, said = sites(tmp_path, **policy), set()
    for rows in (40, 35):
        lines = (tmp_path / "sites" / "anna.csv").read_text().splitlines()
        (tmp_path / "sites" / "anna.csv").write_text("\n".join(lines[: rows + 1]) + "\n")
        said.add(refused(fedavg(**method), files, tmp_path / str(rows), rule))
    (text,) = said
    assert text.endswith("the hospital has fewer" if rule == "least_update" else "100000 epochs here are more")


def test_the_same_patient_again_and_again(tmp_path: Path) -> None:
    """More steps on few patients, in a phase of a method's own: what counts is how many patients it saw."""

    class Probing(FedAvg):
        def local_round(self, site: Site) -> None:
            for _ in range(50):
                (batch,) = site.training_batches(steps=1)
                site.step("fedavg", self.loss(site, batch))

        def loss(self, site: Site, batch: Any) -> torch.Tensor:
            return site.task.loss(site.models["fedavg"](batch.inputs), batch.targets)

    job = small_job(mixers={"fedavg": Mean()}, method=Probing(batch_size=1, steps=16), min_clients=1)
    coordinator, runners = begin(job, sites(tmp_path), tmp_path / "run")
    with pytest.raises(PolicyRefused, match=r"at least 8 training samples behind an update, Probing; this job takes 1"):
        play(coordinator, runners, 1)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_score_of_a_single_patient(tmp_path: Path, split: str) -> None:
    """A split of one row: its accuracy, 0 or 1, would be told after every round."""
    files = sites(tmp_path)
    content = yaml.safe_load(files["anna"].read_text())
    other = {"validation": "test", "test": "validation"}[split]
    parts = [split] + [other] * 5 + ["train"] * 34
    lines = (tmp_path / "sites" / "anna.csv").read_text().splitlines()
    rows = [f"{line},{part}" for line, part in zip(lines[1:], parts, strict=True)]
    (tmp_path / "sites" / "anna.csv").write_text("\n".join([f"{lines[0]},part", *rows]) + "\n")
    content["datasets"]["blood"]["split"] = {"column": "part"}
    files["anna"].write_text(yaml.safe_dump(content))
    said = refused(fedavg(), files, tmp_path, "least_scored")
    assert said.endswith(f"at least 2 scored cases, and its {split} split has fewer")
    files["anna"].write_text(yaml.safe_dump({**content, "policy": {"least_scored": 1}}))
    begin(fedavg(), files, tmp_path / "allowed")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_score_of_several_rows_of_a_single_patient(tmp_path: Path, split: str) -> None:
    """Three visits of one patient passed for three cases."""
    files = sites(tmp_path)
    content = yaml.safe_load(files["anna"].read_text())
    other = {"validation": "test", "test": "validation"}[split]
    parts = [split] * 3 + [other] * 5 + ["train"] * 32
    lines = (tmp_path / "sites" / "anna.csv").read_text().splitlines()

    def declare(patients: list[int]) -> None:
        rows = [f"{line},{part},p{who}" for line, part, who in zip(lines[1:], parts, patients, strict=True)]
        (tmp_path / "sites" / "anna.csv").write_text("\n".join([f"{lines[0]},part,patient", *rows]) + "\n")

    declare([0, 0, 0, *range(1, 38)])
    content["datasets"]["blood"]["split"] = {"column": "part", "group": "patient"}
    files["anna"].write_text(yaml.safe_dump(content))
    said = refused(fedavg(), files, tmp_path, "least_scored")
    assert f"at least 2 patients or recordings whose cases are scored, and its {split} split has fewer; a" in said
    declare([0, 0, 38, *range(1, 38)])
    begin(fedavg(), files, tmp_path / "allowed")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_score_of_a_single_patient_of_whom_labels_are_known(tmp_path: Path, split: str) -> None:
    """Its exact match, 0 or 1, was told after every round: patients without any label passed for scored ones."""
    file = declare(tmp_path / "sites", "anna", "several", split={"column": "part"})
    other = {"validation": "test", "test": "validation"}[split]
    parts = [split] * 6 + [other] * 6 + ["train"] * 48
    head, *lines = (tmp_path / "sites" / "anna.csv").read_text().splitlines()
    assert head.startswith("age,pain,oed,eff,nod,stay")

    def known(count: int) -> None:
        rows = [line.split(",") for line in lines]
        rows = [[*row[:2], *(["", "", ""] if n in range(count, 6) else ["1", "0", ""]), *row[5:]] for n, row in
                enumerate(rows)]  # fmt: skip
        text = [",".join([*row, part]) for row, part in zip(rows, parts, strict=True)]
        (tmp_path / "sites" / "anna.csv").write_text("\n".join([f"{head},part", *text]) + "\n")

    known(1)
    job = small_job(mixers={"fedavg": Mean()}, method=FedAvg(lr=0.05), task=MultiLabel(dataset="ward"), min_clients=1)
    files = {"anna": file, "berta": declare(tmp_path / "sites", "berta", "several")}
    said = refused(job, files, tmp_path, "least_scored")
    assert said.endswith(f"at least 2 scored cases, and its {split} split has fewer")
    known(2)
    begin(job, files, tmp_path / "allowed")
    known(0)
    begin(job, files, tmp_path / "of none")  # nothing is scored


def test_a_federation_of_one(tmp_path: Path) -> None:
    text = refused(fedavg(), sites(tmp_path, ["anna"]), tmp_path, "least_hospitals")
    assert text.endswith("asks for at least 2 hospitals in a job; this job has 1")


def test_one_hospital_under_two_names(tmp_path: Path) -> None:
    coordinator, runners = begin(fedavg(), sites(tmp_path), tmp_path / "run")
    header = coordinator.init_messages()["anna"].header.model_copy(update={"roster": ("anna", "anna")})
    with pytest.raises(PolicyRefused, match=r"this job has 1"):
        runners["anna"].handle(Message(header, {}))


@pytest.mark.parametrize(
    ("rule", "limit", "job"),
    [
        ("least_samples", 30, {}),
        ("most_rounds", 1, {}),
        ("most_finetune", 1, {}),  # it trained all rounds, and then refused the end: no test, and no models there
        ("most_steps", 2, {"epochs": 3}),
        ("most_parameters", 10, {}),
        ("most_megabytes", 1, {"task": Tabular(dataset="blood", hidden=(1000, 1000))}),
        ("methods", ["medpfl.methods.softpull.SoftPull"], {}),
        ("tasks", ["medpfl.tasks.segmentation.Segmentation"], {}),
        ("filters", ["nvflare.app_common.filters.svt_privacy.SVTPrivacy"], {}),
    ],
)
def test_more_than_a_hospital_allows(tmp_path: Path, rule: str, limit: Any, job: dict[str, Any]) -> None:
    files = sites(tmp_path, **{rule: limit})
    text = refused(fedavg(**job), files, tmp_path, rule)
    assert "24" not in text and str(tmp_path) not in text  # anna has 24 training samples


@pytest.mark.parametrize(
    "method",
    [
        FedRep(steps=1, head_steps=10**9),
        FedRep(steps=1, head_epochs=10**9),
        PFedMe(steps=1, inner_steps=10**9),
        MHpFLID(steps=1, distill_epochs=10**400),
        MHpFLID(distill_epochs=10**9),
        FedMD(steps=1, public="shown", distill_epochs=10**9),
        FedSMPersonalised(steps=1, personaliser=PFedMe(inner_steps=10**9)),
    ],
    ids=repr,
)
def test_an_endless_pass_beside_the_usual_one(method: Method) -> None:
    with pytest.raises(
        PolicyRefused, match=rf"\('most_steps'\).*\({type(method).__name__}\); a pass of this job takes"
    ):
        policy.check_passes(Policy(), method, 24, public=24)
    policy.check_passes(Policy(most_steps=10**500), method, 24, public=24)


def test_an_endless_pass_is_refused_before_a_hospital_trains(tmp_path: Path) -> None:
    method = FedRep(steps=3, head_steps=6, batch_size=8)
    job = small_job(rounds=2, mixers={"model": Mean()}, method=method, min_clients=1)
    begin(job, sites(tmp_path / "six", most_steps=6), tmp_path / "six")
    refused(job, sites(tmp_path / "five", most_steps=5), tmp_path / "five", "most_steps")


def test_a_round_a_statistic_and_fine_tuning_beyond_what_was_said_in_the_beginning(tmp_path: Path) -> None:
    files = sites(tmp_path, most_rounds=2, most_finetune=3, least_statistic=100)
    _, runners = begin(fedavg(), files, tmp_path / "run")
    of: dict[str, Any] = {"run": "r", "rounds": 2, "best": {}}
    for header, rule in (
        (TrainRequest(round=3, **of), "most_rounds"),
        (FinishRequest(round=2, finetune=4, **of), "most_finetune"),
        (StatisticsRequest(round=1, names=("moments",), **of), "least_statistic"),
    ):
        with pytest.raises(PolicyRefused, match=rule):
            runners["anna"].handle(Message(header, {}))


@pytest.mark.parametrize("width", [3_000_000, 2**62, 2**70])  # torch counts in 64 bits
def test_a_network_of_absurd_width_costs_nothing(tmp_path: Path, width: int) -> None:
    job = fedavg(task=Tabular(dataset="blood", hidden=(width, width)))
    started = time.process_time()
    with pytest.raises(PolicyRefused, match=r"'most_parameters'\) allows at most 500000000 parameters"):
        begin(job, sites(tmp_path), tmp_path / "run")
    assert time.process_time() - started < 5


def test_no_option_of_a_network_costs_more_than_the_policy_allows(tmp_path: Path) -> None:
    """As a job names it: what a hostile one may write into each option is in tests/models/test_monai_networks.py."""
    for path, args in (
        ("transformers.SwinUNETR", {"feature_size": 12 * 8000}),
        ("dynunet.DynUNet", {"filters": [100_000] * 4}),
        ("segresnet.SegResNet", {"init_filters": 100_000}),
    ):
        network: Architecture = build({"path": f"medpfl.models.{path}", "args": args}, Architecture, "architecture")
        started = time.process_time()
        with pytest.raises(PolicyRefused, match=r"'most_parameters'\)"), policy.building(Policy()):
            network.build((1, 64, 64, 64), 2)
        assert time.process_time() - started < 10


def test_many_small_layers_cost_too() -> None:
    with pytest.raises(ConfigError, match=r"more than 100000 entries"), Bounded(100_000):
        for _ in range(1000):
            torch.empty(1)


def test_the_server_hears_one_sentence(tmp_path: Path) -> None:
    files = sites(tmp_path)
    file = files["anna"]
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "policy": {"least_samples": 30}}))
    done = Harness(fedavg(rounds=1), files, tmp_path / "flare").run()
    assert done.engine.panic is None
    events = [event for event in done.controller.coordinator.record.events if event.site == "anna"]
    assert "('least_samples') asks for at least 30 training samples" in events[0].event


def test_a_hospital_sees_before_joining_what_it_would_refuse(tmp_path: Path) -> None:
    job, files = write_job(fedavg(rounds=3), tmp_path / "job"), sites(tmp_path, most_rounds=2)
    allowed = files["anna"].with_name("generous.yaml")
    allowed.write_text(files["anna"].read_text().replace("most_rounds: 2", "most_rounds: 3"))
    for file, code, words in (
        (files["anna"], 1, "('most_rounds') allows at most 2 rounds; this job wants 3"),
        (allowed, 0, f"small keeps to the policy of {allowed}"),
    ):
        done = CliRunner().invoke(app, ["check-job", str(job), "--site-file", str(file)])
        assert (done.exit_code, "least_hospitals: 2 (default)" in done.output) == (code, True)
        assert words in (done.output if code == 0 else str(done.exception))


class Noise(DXOFilter):
    """Stands for a privacy filter."""

    def __init__(self) -> None:
        super().__init__(supported_data_kinds=[], data_kinds_to_filter=[])

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: FLContext) -> None:
        return None


def test_a_required_filter_that_acts_on_a_part_only(tmp_path: Path) -> None:
    """It must stand in the hospital's own privacy scope, or in the job before everything that leaves."""
    name = f"{Noise.__module__}.Noise"
    fl_ctx = Engine("anna", new_workspace(tmp_path, "anna"), {}, []).new_context()
    config = tmp_path / "anna" / "job-1" / "app_anna" / "config" / "config_fed_client.json"
    config.parent.mkdir(parents=True)
    whole = {"tasks": ["statistics", "train", "refine"], "filters": [{"path": name}]}
    for entry, found in (
        (whole, (name,)),
        ({**whole, "tasks": ["train"]}, ()),
        ({**whole, "tasks": ["*"]}, ()),  # FLARE takes it for the name of a task
        ({**whole, "direction": "in"}, ()),
    ):
        config.write_text(json.dumps({"task_result_filters": [entry]}))
        assert filters_out(fl_ctx) == found
    config.write_text("{}")
    scope = Scope()
    scope.add_task_result_filter(Noise(), "out")
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
    assert filters_out(fl_ctx) == (name,)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"least_sample": 3}, r"unknown key 'policy\.least_sample'"),
        ({"least_samples": 0}, r"'policy\.least_samples': input should be greater than or equal to 1, got 0"),
        ({"most_rounds": "many"}, r"'policy\.most_rounds': .*, got 'many'"),
        ({"most_rounds": True}, r"'policy\.most_rounds': .*, got True"),
        ({"methods": ["medpfl."]}, r"'policy\.methods\.0': .*, got 'medpfl\.'"),
        ({"methods": "SoftPull"}, r"'policy\.methods': .*, got 'SoftPull'"),
    ],
)
def test_a_policy_with_a_mistake_is_no_policy(tmp_path: Path, policy: dict[str, Any], words: str) -> None:
    """A misspelt rule must not silently be the default."""
    with pytest.raises(SiteFileError, match=words):
        load_site_file(sites(tmp_path, ["anna"], **policy)["anna"])


def test_what_a_site_file_does_not_say_is_still_a_rule(tmp_path: Path) -> None:
    lines = list(load_site_file(sites(tmp_path, ["anna"], most_rounds=7)["anna"]).policy.described())
    assert "most_rounds: 7" in lines and "least_hospitals: 2 (default)" in lines and "methods: any (default)" in lines
    assert len(lines) == len(Policy.model_fields)
