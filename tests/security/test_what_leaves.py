# SPDX-License-Identifier: Apache-2.0
"""The list of what leaves a hospital is complete: everything that is found on the wire stands on it."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from torch import nn
from typer.testing import CliRunner

from every_method import EVERY, write_both
from exchanging import Asked, slots
from hostile import attacked
from in_process import Harness
from medpfl import store
from medpfl.cli import app
from medpfl.core.codecs import CER
from medpfl.core.mixers import Mean, Mixer, NetworkProx
from medpfl.data.site_file import load_site_file
from medpfl.job import EvaluationJob, Job, load_job, write_evaluation_job
from medpfl.job.codecs import Codecs
from medpfl.methods.contract import Method, Site
from medpfl.methods.dsfl import DSFL
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.feddf import FedDF
from medpfl.methods.fedmd import FedMD
from medpfl.methods.kt_pfl import KTpFL
from medpfl.methods.on_public_data import OnPublicData
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.start import Start
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.rounds.coding import PAYLOAD
from medpfl.rounds.hospital.before import prospect
from medpfl.rounds.leaves import _ECHOED, _described, leaves_of
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import Plan, Reply, Sizes
from small_jobs import for_few, small_job, write_table_sites
from tools import exchange, normed, pieces, ready, run

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Job]
METHODS: dict[str, tuple[Method, dict[str, Mixer] | None]] = {
    "FedAvg": (FedAvg(lr=0.05, steps=1), {"fedavg": Mean()}),
    "PFedNet": (PFedNet(lr=0.05, steps=1), {"shared": Mean(), "personal": NetworkProx(tau=0.1, neighbours=1)}),
    "complete": (PFedNet(lr=0.05, steps=1), {"shared": Mean(), "personal": NetworkProx(tau=0.1, neighbours=3)}),
    "exchanges": (Asked(lr=0.05, steps=1), slots()),
}
KIND = {"kind": "checkpoint"}

Seen = set[tuple[str, str]]


def look(task: str, answer: Shareable, coded: bool = False) -> Seen:
    """What is in an answer, in the words of the list."""
    dxo = from_shareable(answer)
    assert set(answer) == {"__headers__", "DXO"} and set(dxo.meta) == {"medpfl"}
    assert set(answer["__headers__"]) == {"__content_type__"}
    said = json.loads(dxo.meta["medpfl"])
    assert set(said) <= {"content", "coded"} and (coded or said.get("coded") is None)
    seen = {(task, field) for field in (*said["content"], *["coded"] * bool(said.get("coded")))}
    what = "tensors of '{}'" if task == "statistics" else "tensors of slot '{}'"
    for entry in dxo.data:
        slot, _, name = entry.partition("::")
        seen.add((task, what.format(name if slot == PAYLOAD else slot)))
    return {one for one in seen if one[1] not in _ECHOED}


def listed(job: Job | EvaluationJob, hospitals: int = 4) -> Seen:
    return {(one.when, one.what) for one in leaves_of(job, hospitals)}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_nothing_is_on_the_wire_that_is_not_on_the_list(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, name: str
) -> None:
    method, mixers = METHODS[name]
    job = make_job(rounds=2, method=method, mixers=mixers)
    expected = listed(job)  # components know more after a run
    assert ("statistics", "tensors of 'moments'") not in expected or name == "PFedNet"
    seen: Seen = set()

    def heard(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        seen.update(look(asked.header.task, honest))
        return honest

    attacked(job, table_sites, tmp_path, heard)
    assert seen == expected


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("both"))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.slow
def test_of_every_method_the_list_and_its_sizes_are_those_of_the_messages(
    name: str, both: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    """Of what, how often, and of which shapes and bytes; and which numbers of its own a method tells."""
    small = EVERY[name]
    job, files = small.job(), both[small.images]
    lines = prospect(job, load_site_file(files["anna"]), len(files)).lines
    expected, seen = listed(job, len(files)), Counter[str]()
    found: Seen = set()
    tensors: dict[str, dict[str, Any]] = {}
    numbers: set[str] = set()

    def heard(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if site == "anna":
            task = asked.header.task
            seen[task] += 1
            found.update(look(task, honest))
            told = json.loads(from_shareable(honest).meta["medpfl"])["content"].get("metrics", ())
            numbers.update(line["model"] for line in told if line["model"] in line["metrics"])
            tensors.setdefault(task, {}).update(from_shareable(honest).data)
        return honest

    attacked(job, files, tmp_path, heard)
    assert found == expected
    for line in lines:
        if line.what == "metrics" and line.when in ("train", "validate"):
            assert set(filter(None, line.meaning.partition("own numbers about its models: ")[2].split(", "))) == numbers
        times = "once" if seen[line.when] == 1 else f"{seen[line.when]} times"
        assert line.often.partition(",")[0] == times or line.often == f"at most {job.settings.rounds} times", line
        slot = line.what.partition("'")[2].rstrip("'")
        if line.what.startswith("tensors of slot"):
            sent = {
                key.partition("::")[2]: array
                for key, array in tensors[line.when].items()
                if key.startswith(f"{slot}::")
            }
            assert {key: array.shape for key, array in sent.items()} == line.shapes
            assert sum(array.nbytes for array in sent.values()) == line.bytes


def test_who_sees_a_hospital_s_model_by_itself_is_said() -> None:
    def seen(name: str, **settings: Any) -> dict[str, str]:
        job = EVERY[name].job()
        job = replace(job, settings=replace(job.settings, **settings))
        return {line.what: line.shown for line in leaves_of(job) if line.when == "train"}

    server = "the server, and the lead in its results"
    assert seen("SoftPull")["tensors of slot 'model'"] == f"{server}; the other hospitals, mixed"
    assert seen("SoftPull", encryption="ckks")["tensors of slot 'model'"] == "the other hospitals, mixed"
    assert seen("FedSMExtra")["tensors of slot 'personal'"].startswith(
        f"{server}; the other hospitals, mixed, and each hospital's by itself"
    )
    assert seen("FedSMEnsemble")["tensors of slot 'personal'"].endswith("by itself whoever gets the job's super model")
    assert set(seen("FedSMEnsemble").values()) > {server}


def test_ifca_shows_the_others_the_model_of_who_alone_has_chosen_it(
    both: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list said that other hospitals see it mixed, and the mean of one is that one."""

    def loss(site: Site, network: nn.Module) -> float:  # anna takes the first model, berta the second
        return float((network is site.models["cluster0"]) == (site.name == "berta"))

    monkeypatch.setattr("medpfl.methods.ifca._training_loss", loss)
    job = EVERY["IFCA"].job()
    coordinator, runners = pieces(job, both[False], tmp_path)
    ready(coordinator, runners)
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    sent = {key: tensor.clone() for key, tensor in replies["anna"].slots["cluster0"].items()}
    coordinator.rounds.take_train(1, replies)
    shown = coordinator.rounds.train_messages(2, coordinator.joined)["berta"].slots["cluster0"]
    weights = [key for key, tensor in sent.items() if tensor.is_floating_point()]  # counts and flags are not mixed
    assert len(weights) > 4 and all(torch.equal(sent[key], shown[key]) for key in weights)
    told = {line.what: line.shown for line in leaves_of(job, 2) if line.when == "train"}
    assert told["tensors of slot 'cluster0'"].endswith("by itself where no other hospital has chosen the same model")


def test_fedap_shows_a_hospital_the_model_of_the_one_whose_statistics_it_has(tmp_path: Path) -> None:
    """The list said that other hospitals see it mixed. dora guesses anna's statistics, to a hundredth of a percent."""
    sites = write_table_sites(tmp_path / "sites")
    for file in sites.values():
        for_few(file)
    job = EVERY["FedAP"].job()
    coordinator, runners = pieces(job, sites, tmp_path)
    ready(coordinator, runners)
    told = exchange(runners, coordinator.rounds.statistics_messages(1, coordinator.joined))
    for name, state in told["anna"].slots.items():
        told["dora"].slots[name] = {key: tensor * 1.0001 for key, tensor in state.items()}
    coordinator.rounds.take_statistics(1, told)
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    sent = {
        site: {key: tensor.clone() for key, tensor in reply.slots["model"].items()} for site, reply in replies.items()
    }
    coordinator.rounds.take_train(1, replies)
    shown = coordinator.rounds.train_messages(2, coordinator.joined)["dora"].slots["model"]
    for key, tensor in shown.items():
        found = 2 * tensor - sent["dora"][key]  # lam is 0.5
        assert (found - sent["anna"][key]).norm() < 1e-3 * (sent["anna"][key] - sent["berta"][key]).norm()


@pytest.mark.parametrize(
    ("name", "slot", "ending"),
    [
        ("FedAP", "model", "far nearer to this one's than all others'"),
        ("FedAMP", "anchor", "near this one's and far from all others'"),
        ("PFedNet", "personal", "its only neighbour in the network, where that has no other"),
    ],
)
def test_the_list_says_when_who_hears_of_whom_leaves_a_hospital_one_other_model(
    name: str, slot: str, ending: str
) -> None:
    told = {line.what: line.shown for line in leaves_of(EVERY[name].job(), 4) if line.when == "train"}
    assert " mixed, and by itself (less its own part) to " in told[f"tensors of slot '{slot}'"]
    assert told[f"tensors of slot '{slot}'"].endswith(ending)


def test_where_rounds_ask_some_hospitals_the_list_says_how_often_at_most() -> None:
    """It said that a hospital trains in every round, where two of four are drawn for each."""
    job = EVERY["PFedNet, alternating"].job(4)
    for asked, start in ((None, ""), (2, "at most ")):
        some = replace(job, settings=replace(job.settings, hospitals_per_round=asked))
        often = {line.when: line.often for line in leaves_of(some, 4)}
        assert (often["train"], often["refine"]) == (f"{start}4 times", f"{start}4 times")
        assert often["validate"] == often["finish"] == "once"  # all that joined are asked in the end


def on_the_wire(job: Job | EvaluationJob, sites: dict[str, Path], folder: Path, coded: bool = False) -> Seen:
    """What FLARE carries from the hospitals, after all filters."""
    harness = Harness(job, sites, folder).run()
    assert harness.engine.panic is None
    seen: Seen = set()
    for _, task, payload in harness.wire:
        answer = fobs.loads(payload)
        assert answer.get_return_code() == ReturnCode.OK
        seen |= look(task, answer, coded)
    return seen


@pytest.mark.harness
@pytest.mark.slow
def test_of_a_job_with_noise_the_list_says_what_has_it_and_what_stays() -> None:
    """FedSM's gradients of the selector have noise like all that it sends, and training losses do not leave."""
    job = EVERY["FedSM"].job(privacy=ClippedNoise(clip=0.5, noise_multiplier=2.0))
    said = {one.what: one.meaning for one in leaves_of(job, 2) if one.when == "train"}
    assert said["loss"].startswith("nothing: a job that asks for privacy")
    assert "own numbers" not in said["metrics"]  # they are withheld
    for slot in job.mixers:
        assert "shortened to 0.5 and has noise of 2.0 times that" in said[f"tensors of slot '{slot}'"]
    assert said["tensors of slot 'selector'"].startswith("gradients")


@pytest.mark.parametrize(("privacy", "end"), [(None, ""), (DPSGD(noise_multiplier=1.0), ", without noise")])
def test_start_weights_leave_as_they_are_and_the_list_says_so(
    privacy: DPSGD | None, end: str, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint may be the fruit of a hospital's own patients, and no noise is on it in any job."""
    job = small_job(1, {"fedavg": Mean()}, FedAvg(steps=1, start=Start("first"), privacy=privacy))
    (told,) = [line.meaning for line in leaves_of(job, 4) if line.when == "init" and line.what.startswith("tensors")]
    assert told.endswith(f"the weights of the site file's checkpoint 'first'{end}")
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (1, 4), "2.bias": (1,)}
    store.save(tmp_path / "it.safetensors", {key: torch.full(shape, 0.25) for key, shape in shapes.items()}, KIND)
    content = yaml.safe_load(table_sites["anna"].read_text())
    content["checkpoints"] = {"first": str(tmp_path / "it.safetensors")}
    table_sites["anna"].write_text(yaml.safe_dump(content))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    reply = exchange(runners, {"anna": coordinator.init_messages()["anna"]})["anna"]
    assert all(bool((tensor == 0.25).all()) for tensor in reply.slots["fedavg"].values())


def test_with_codecs_it_is_what_they_make_of_it(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = replace(make_job(rounds=2, method=Asked(lr=0.05), mixers=slots()), codecs=Codecs(None, CER(0.1)))
    assert on_the_wire(job, table_sites, tmp_path, coded=True) == listed(job)
    assert {one.meaning for one in leaves_of(job) if one.what.startswith("tensors of slot")} == {
        "initial values, equal everywhere", "what training made of them, encoded (CER)"
    }  # fmt: skip


@pytest.mark.harness
@pytest.mark.slow
def test_of_an_evaluation_it_is_metrics(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(make_job(), table_sites, tmp_path / "trained")
    model = tmp_path / "trained" / "home" / "anna" / "small" / "models" / "personal-best.safetensors"
    job = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    assert on_the_wire(job, table_sites, tmp_path / "flare") == listed(job)
    assert not [one for one in leaves_of(job) if "tensors" in one.what]


@pytest.mark.parametrize("kind", [DSFL, FedMD, FedDF, KTpFL])
@pytest.mark.slow
def test_of_public_data_it_is_one_slot(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: type[OnPublicData]
) -> None:
    for file in table_sites.values():
        content = yaml.safe_load(file.read_text())
        content["datasets"]["shared"] = {**content["datasets"]["blood"], "files": ["anna.csv"], "public": True}
        file.write_text(yaml.safe_dump(content))
    method = kind(public="shared", lr=0.05, batch_size=8)
    job = make_job(rounds=2, method=method, mixers=method.components())
    seen: Seen = set()

    def heard(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        seen.update(look(asked.header.task, honest))
        if asked.header.task == "train":
            (values,) = from_shareable(honest).data.values()
            assert len(values) == 40  # a row for each public sample, none for the hospital's own
        return honest

    attacked(job, table_sites, tmp_path, heard)
    assert seen == listed(job)
    (told,) = [one.meaning for one in leaves_of(job) if one.when == "train" and "tensors" in one.what]
    assert "of public data, row by row, is of 'shared' alone" in told


def test_every_field_of_every_reply_is_described() -> None:
    for kind in (*get_args(Reply), Plan, Sizes):
        assert set(kind.model_fields) - _ECHOED == set(_described(kind)) - _ECHOED


def test_the_page_for_hospital_it_has_what_the_command_says() -> None:
    said = CliRunner().invoke(app, ["leaves", "softpull_phantom"], env={"COLUMNS": "400"})
    assert said.exit_code == 0 and "| train | loss | the training loss" in said.output
    assert said.output.strip() in (ROOT / "docs" / "roles" / "hospital-it.md").read_text(encoding="utf-8")


def test_the_page_of_a_method_names_the_numbers_of_its_own_that_leave() -> None:
    """APFL's page said of its alpha that it is in no message, and every validation told it."""
    told = {
        "auto.md": "three weights w", "cusfl.md": "four numbers of the alignment", "fedsm.md": "selector_accuracy",
        "mh_pflid.md": "receiver_correlation",
    }  # fmt: skip
    for page, words in told.items():
        section = (ROOT / "docs" / "methods" / page).read_text(encoding="utf-8").split("## Privacy: what leaves")[1]
        assert words in section, page
    baselines = (ROOT / "docs" / "methods" / "baselines.md").read_text(encoding="utf-8")
    section = baselines.split("## Privacy: what leaves")[1]
    for small in EVERY.values():
        for name in small.method().diagnoses:
            if small.kind.__name__ in ("APFL", "MoE"):
                assert f"`{name}`" in section, name


def test_short_lists_on_pages_name_what_the_whole_list_names() -> None:
    """Who reads one method's page alone took its list for the whole, and names of features, intervals and the
    hospital's choice were not on it."""
    softpull = (ROOT / "docs" / "methods" / "softpull.md").read_text(encoding="utf-8").split("- As in every job:")[1]
    hospital = (ROOT / "docs" / "roles" / "hospital-it.md").read_text(encoding="utf-8").split("| leaves | stays |")[1]
    for short in (softpull.split("\n\n")[0], hospital.split("\n\n")[0]):
        for word in ("features", "categories and units", "channels", "intervals", "chooses", "gains", "MedPFL"):
            assert word in short, word
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert page.name == "softpull.md" or "As in every job:" not in text, page.name


def test_batch_norm_s_counts_of_steps_leave_unmixed_and_the_pages_say_so(tmp_path: Path) -> None:
    """SoftPull's and pFedNet's pages said that they stay at the hospital."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    coordinator, runners = pieces(small_job(2, task=normed()), sites, tmp_path / "run")
    ready(coordinator, runners)
    count = "model.1.num_batches_tracked"
    sent = exchange(runners, coordinator.rounds.train_messages(1, ["anna", "berta"]))
    told = {site: int(reply.slots["model"][count]) for site, reply in sent.items()}
    assert told["anna"] > 0 < told["berta"]
    coordinator.rounds.take_train(1, sent)
    back = coordinator.rounds.train_messages(2, ["anna", "berta"])
    assert {site: int(message.slots["model"][count]) for site, message in back.items()} == told
    for page in ("softpull.md", "pfednet.md"):
        text = " ".join((ROOT / "docs" / "methods" / page).read_text(encoding="utf-8").split())
        assert re.search(r"counters? (of steps )?(travels?|is sent|are sent)", text), page
