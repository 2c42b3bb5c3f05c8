# SPDX-License-Identifier: Apache-2.0
"""Training data on a hospital's device: one copy for all networks of a round, the same bits, memory given back."""

from pathlib import Path

import pytest
import torch

from baselines import begin
from every_method import EVERY, write_both
from medpfl.core.devices import bytes_for_data, device_for, moved
from medpfl.core.errors import ConfigError, SiteFileError
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.resident import Resident
from medpfl.rounds.site import SiteRunner
from tools import normed, round_of


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def three_networks() -> Job:
    """The job's method, and two references beside it."""
    settings = Settings(rounds=2, references=("local", "fedavg"), finetune=0)
    method = EVERY["SoftPull"].method()
    return Job("small", 2, settings, {}, method, normed())


def two_rounds(job: Job, sites: dict[str, Path], folder: Path, most: int) -> dict[str, SiteRunner]:
    coordinator, runners = begin(job, sites, folder)
    for runner in runners.values():
        runner.rounds.resident = Resident(runner.device, most)
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
        assert runner.rounds.resident._left == most  # of the round's batches nothing stays


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
    runner.rounds.resident = Resident(runner.device, {"nothing": 0, "batches": whole, "samples": whole}[keeps])
    if keeps == "batches":
        monkeypatch.setattr(type(runner.task), "shows_as_they_are", False)
    for module in ("site", "resident"):
        monkeypatch.setattr(f"medpfl.methods.{module}.moved", counted)
    runner.handle(coordinator.rounds.train_messages(1, ["anna"])["anna"])
    inputs = [shape for shape in made if len(shape) == 2]
    assert len([shape for shape in inputs if shape[0] < rows]) == copies * -(-rows // 6)
    assert [shape for shape in inputs if shape[0] == rows] == ([(rows, 3)] if copies == 0 else [])


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


def test_the_site_file_says_which_gpu(table_sites: dict[str, Path], tmp_path: Path) -> None:
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
