# SPDX-License-Identifier: Apache-2.0
"""A hospital's data on its device: one copy for all networks, the same bits, memory given back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines import begin
from every_method import EVERY, write_both
from medpfl.core.devices import bytes_for_data, device_for, moved
from medpfl.core.errors import ConfigError, SiteFileError
from medpfl.data.resident import Resident, case_of, part_of, serving
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.simulate import simulate
from tools import normed, round_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def three_networks() -> Job:
    """The job's method, and two references beside it."""
    settings = Settings(rounds=3, references=("local", "fedavg"), finetune=0)
    method = EVERY["SoftPull"].method()
    return Job("small", 2, settings, {}, method, normed())


def two_rounds(job: Job, sites: dict[str, Path], folder: Path, most: int) -> dict[str, SiteRunner]:
    coordinator, runners = begin(job, sites, folder)
    for runner in runners.values():
        runner.rounds.resident = runner.rounds.holding(most)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    return runners


@pytest.mark.parametrize("name", ["three networks", "FedSM", "PerFedAvg"])
@pytest.mark.parametrize("most", [2**24, 2000])
def test_what_stays_on_the_device_changes_no_bit(
    name: str, most: int, device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    small = EVERY.get(name)
    job, images = (small.job(), small.images) if small else (three_networks(), False)
    with_, without = (
        two_rounds(job, sites[images], tmp_path / str(kept), kept) for kept in (most, 0)
    )  # of 2,000 bytes a part of the round's batches
    for site, runner in with_.items():
        other = without[site].models.state_dict()
        assert all(torch.equal(tensor, other[key]) for key, tensor in runner.models.state_dict().items())
        resident, size = runner.rounds.resident, runner.rounds.resident.size
        assert size <= most
        resident.forget_round()
        assert resident.size == size  # of the round's batches nothing stayed


@pytest.mark.parametrize(("keeps", "copies"), [("nothing", 3), ("batches", 1), ("samples", 0)])
def test_networks_of_a_round_share_one_copy_of_a_batch(
    keeps: str, copies: int, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of a batch are copied as often as there are networks; once where the round's batches stay; not at all
    where all samples lie there, which are copied once."""
    made: list[tuple[int, ...]] = []

    def counted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        made.append(tuple(tensor.shape))
        return moved(tensor, device)

    coordinator, runners = begin(three_networks(), sites[False], tmp_path)
    runner = runners["anna"]
    rows = len(runner.data.splits["train"])
    whole = rows * (3 * 4 + 8)  # three float32 columns and an int64 class
    runner.rounds.resident = runner.rounds.holding({"nothing": 0, "batches": whole, "samples": whole}[keeps])
    if keeps == "batches":
        monkeypatch.setattr(type(runner.task), "shows_as_they_are", False)
    for name in ("methods.site.moved", "data.resident.moved", "data.resident.placed"):
        monkeypatch.setattr(f"medpfl.{name}", counted)
    runner.handle(coordinator.rounds.train_messages(1, ["anna"])["anna"])
    inputs = [shape for shape in made if len(shape) == 2]
    assert len([shape for shape in inputs if shape[0] < rows]) == copies * -(-rows // 6)
    assert [shape for shape in inputs if shape[0] == rows] == ([(rows, 3)] if copies == 0 else [])


def sizes_of(runner: SiteRunner) -> dict[str, int]:
    """Bytes of each split: three float32 columns and an int64 class."""
    return {split: len(samples) * (3 * 4 + 8) for split, samples in runner.data.splits.items()}


@pytest.mark.parametrize("room", ["none", "training", "all"])
def test_validation_cases_are_copied_once_for_all_networks_and_rounds(
    room: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room every round and network copies them; training data come first."""
    made: list[int] = []

    def counted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        made.append(tensor.data_ptr())
        return moved(tensor, device)

    coordinator, runners = begin(three_networks(), sites[False], tmp_path)
    runner = runners["anna"]
    sizes = sizes_of(runner)
    most = {"none": 0, "training": sizes["train"] + sizes["validation"] // 8, "all": sum(sizes.values())}[room]
    runner.rounds.resident = runner.rounds.holding(most)
    validation = runner.data.splits["validation"].inputs
    assert isinstance(validation, torch.Tensor) and 0 < len(validation) <= 64
    for name in ("moved", "placed"):
        monkeypatch.setattr(f"medpfl.data.resident.{name}", counted)
    for number in (1, 2, 3):
        round_of(coordinator, runners, number)
    copies = made.count(validation.data_ptr())
    assert copies == 1 if room == "all" else copies >= 3 * 2  # the mixed models of two rounds were looked at
    assert (runner.rounds.resident.whole(runner.data.splits["train"]) is None) == (room == "none")


def test_training_data_come_first_also_where_a_job_goes_on(sites: dict[bool, dict[str, Path]], tmp_path: Path) -> None:
    """A process that takes a job up evaluates before it trains."""
    _, runners = begin(EVERY["FedAvg"].job(), sites[False], tmp_path)
    runner = runners["anna"]
    sizes, splits = sizes_of(runner), runner.data.splits
    for room, held in ((sizes["train"], False), (sizes["train"] + sizes["validation"], True)):
        resident = runner.rounds.holding(room)
        with serving(resident):
            part_of(splits["validation"].inputs, slice(0, 2), runner.device)
        assert (resident.size > 0) is held
        assert resident.whole(splits["train"]) is not None
        assert resident.size <= room


def test_results_are_those_of_a_device_that_keeps_nothing(
    device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation, choice and the tests at the end, of the method and of two references."""
    found = []
    for most in (0, 400, 2**24):
        monkeypatch.setattr("medpfl.rounds.hospital.site.bytes_for_data", lambda *_, most=most: most)
        simulate(three_networks(), sites[False], tmp_path / f"results {most}", tmp_path / f"home {most}")
        summary = json.loads((tmp_path / f"results {most}" / "summary.json").read_text())
        lines = (tmp_path / f"results {most}" / "metrics.jsonl").read_text().splitlines()
        metrics = [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]
        found.append((summary["test"], metrics))
    assert found[0] == found[1] == found[2] and found[0][0]


def test_what_is_first_asked_for_in_an_evaluation_can_be_trained_with() -> None:
    samples = Samples(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), np.arange(4), list("abcd"))
    device = torch.device("meta")
    resident = Resident(device, 2**10, 0, [samples])
    with torch.inference_mode(), serving(resident):
        part = part_of(samples.inputs, slice(0, 2), device)
    assert resident.size == 4 * 3 * 4
    held = resident.evaluated(samples.inputs)
    assert held is not None and not held.is_inference() and part.shape == (2, 3)
    assert resident.evaluated(torch.ones(4, 3)) is None, "rows of no split"


def test_whole_cases_lie_there_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(1, 2, 3), (1, 4, 2)]
    rows = CaseRows(torch.arange(14.0), shapes, (2, 2))
    samples = Samples(rows, rows, np.arange(2), ["a", "b"])
    device = torch.device("cpu")
    with serving(Resident(device, 10**3, 0, [samples])):
        assert all(torch.equal(case_of(rows, number, device), rows.whole(number)) for number in (0, 1))
        monkeypatch.setattr(CaseRows, "whole", None)
        assert [tuple(case_of(rows, number, device).shape) for number in (0, 1)] == shapes


def test_after_a_failed_round_nothing_stays(sites: dict[bool, dict[str, Path]], tmp_path: Path) -> None:
    runners = two_rounds(EVERY["FedAvg"].job(), sites[False], tmp_path, 2**24)
    runners["anna"].recover()
    assert runners["anna"].rounds.resident.whole(runners["anna"].data.splits["train"]) is None


def test_a_processor_keeps_no_second_copy() -> None:
    assert bytes_for_data(torch.device("cpu"), 4.0) == 0
    assert bytes_for_data(torch.device("cuda"), 0.5) == 2**29


@pytest.mark.parametrize(
    ("wanted", "named", "turn", "count", "expected"),
    [
        ("", None, 0, 0, "cpu"),
        ("", None, 0, 1, "cuda"),
        ("", None, 3, 1, "cuda"),  # hospitals share the one GPU
        ("", None, 1, 2, "cuda:1"),  # or take one each
        ("", None, 2, 2, "cuda"),
        ("", "cuda:1", 0, 2, "cuda:1"),
        ("", "cpu", 1, 2, "cpu"),
        ("cuda:0", "cuda:1", 1, 2, "cuda:0"),
    ],
)
def test_hospitals_of_one_process_take_its_gpus_in_turn(
    wanted: str, named: str | None, turn: int, count: int, expected: str
) -> None:
    assert device_for(wanted, named, turn, count) == expected


def test_a_site_file_s_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gpu.device is 'cuda:1', but torch finds 1 GPU here"):
        device_for("", "cuda:1", 0, 1)


def test_the_site_file_says_which_gpu(
    table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEDPFL_DEVICE")
    job = EVERY["FedAvg"].job()
    sites = {name: table_sites[name] for name in ("anna", "berta")}
    sites["anna"].write_text(sites["anna"].read_text() + "gpu: {device: cpu, cache_gb: 2}\n")
    begin(job, sites, tmp_path)
    sites["anna"].write_text(sites["anna"].read_text().replace("device: cpu", "device: 'cuda:99'"))
    with pytest.raises(ConfigError, match=r"the site file's gpu.device is 'cuda:99', but torch finds"):
        begin(job, sites, tmp_path / "again")
    sites["anna"].write_text(sites["anna"].read_text().replace("cuda:99", "gpu"))
    with pytest.raises(SiteFileError, match=r"'gpu.device'"):
        begin(job, sites, tmp_path / "once more")
