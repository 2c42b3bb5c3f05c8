# SPDX-License-Identifier: Apache-2.0
"""Which device is taken, and what is said when its memory does not suffice."""

import json
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from baselines import begin
from every_method import EVERY
from medpfl.core.devices import bytes_for_data, memory_errors, moved, placed, training_device
from medpfl.core.errors import ConfigError, OutOfMemory
from medpfl.flare.gpus import runs_on
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Site
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.precision import half_of
from medpfl.rounds.hospital import local_rounds
from medpfl.rounds.simulate import simulate
from tools import normed, round_of


def test_the_environment_chooses_the_device(device: str) -> None:
    assert training_device().type == device
    batch = torch.arange(6.0).view(2, 3)
    assert moved(batch, training_device()).device.type == device
    assert torch.equal(moved(batch, training_device()).cpu(), batch)


@pytest.mark.parametrize("wanted", ["gpu", "mps", "cuda:99", "cuda:-2"])
def test_a_device_that_is_not_there_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDPFL_DEVICE", wanted)
    with pytest.raises(ConfigError, match=f"^MEDPFL_DEVICE .*'{wanted}'"):
        training_device()


def test_what_torch_says_of_too_little_memory_is_one_sentence() -> None:
    with pytest.raises(OutOfMemory) as raised, memory_errors("take less"):
        torch.empty(2**60, dtype=torch.uint8)
    assert raised.value.public == str(raised.value) == "this hospital's memory does not suffice: take less"
    with pytest.raises(OutOfMemory, match="GPU does not suffice"), memory_errors("take less"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(RuntimeError, match="mat1 and mat2"), memory_errors("take less"):  # as it is
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_memory_that_libraries_take_past_torch_is_the_gpu_s(said: str) -> None:
    with pytest.raises(OutOfMemory, match="hospital's GPU does not suffice: take less"), memory_errors("take less"):
        raise RuntimeError(said)


class OnGPU(torch.Tensor):
    """Where locked memory was made, and which GPU was current."""

    places: ClassVar[list[object]] = []

    def pin_memory(self, *args: object) -> torch.Tensor:
        self.places.append(torch.cuda.current_device())
        return torch.empty(0)


def test_a_second_gpu_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked memory made for "the" GPU takes some of the first one's, and the first may have another format."""
    now = [0]

    class Entered:
        def __init__(self, device: torch.device):
            self.number = device.index or 0

        def __enter__(self) -> None:
            self.before, now[0] = now[0], self.number

        def __exit__(self, *_: object) -> None:
            now[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: now[0] == 1)
    assert half_of(FedAvg(), torch.device("cuda:1")) is torch.bfloat16
    assert half_of(FedAvg(), torch.device("cuda:0")) is None
    monkeypatch.setattr(OnGPU, "to", lambda self, *_, **__: self, raising=False)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)
    moved(torch.ones(2).as_subclass(OnGPU), torch.device("cuda:1"))
    assert OnGPU.places == [1] and now == [0]
    placed(torch.ones(2).as_subclass(OnGPU), torch.device("cuda:1"))
    assert OnGPU.places == [1], "torch would keep that much locked memory for ever"


def test_hospitals_of_one_process_do_not_fill_its_gpu_with_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks before any has taken something."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = torch.device("cuda")
    assert bytes_for_data(gpu, None) == bytes_for_data(gpu, None, 10) == 2**30 // 10
    for hospitals in (25, 40):
        assert 0.4 * 2**30 < hospitals / 2 * bytes_for_data(gpu, None, hospitals) <= 2**29
    assert bytes_for_data(gpu, 0.5, 40) == 2**29, "as the hospital says"


def test_too_little_memory_costs_a_hospital_its_round(
    device: str, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers in one sentence, and trains again when it is asked for less."""
    sites = {name: table_sites[name] for name in sorted(table_sites)[:2]}
    coordinator, runners = begin(EVERY["FedAvg"].job(), sites, tmp_path)
    runner = next(iter(runners.values()))
    forward = torch.nn.Linear.forward

    def greedy(self: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        return forward(self, inputs) + torch.empty(2**55, device=inputs.device).sum()

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", greedy)
        with pytest.raises(OutOfMemory, match=r"batch_size \(now 6\)"):
            round_of(coordinator, {runner.name: runner}, 1)
    runner.recover()
    round_of(coordinator, runners, 1)


def test_what_a_failed_round_computed_is_forgotten() -> None:
    """Else the next round would begin beside the activations of the last, as long as its error is at hand."""
    held: list[weakref.ref[torch.Tensor]] = []

    def train() -> None:
        activations = torch.ones(4)
        held.append(weakref.ref(activations))
        torch.empty(2**60, dtype=torch.uint8)

    with pytest.raises(OutOfMemory) as raised, memory_errors("take less"):
        train()
    assert held[0]() is None, raised.value


def test_a_failed_round_s_networks_are_gone_before_new_ones_are_made(
    table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no room for both, nor for the optimisers' state. If there is none for the new ones either, the
    hospital misses another round, and no more."""
    sites = {name: table_sites[name] for name in sorted(table_sites)[:2]}
    coordinator, runners = begin(EVERY["FedAvg"].job(), sites, tmp_path)
    round_of(coordinator, runners, 1)
    runner = next(iter(runners.values()))
    held = [weakref.ref(parameter) for parameter in runner.models.parameters()]
    held += [weakref.ref(state["exp_avg"]) for one in runner.run.optimizers.values() for state in one.state.values()]
    assert len(held) > 3
    alive: list[int] = []

    def full(*args: object) -> None:
        alive.append(sum(one() is not None for one in held))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(local_rounds, "Networks", full)
        runner.recover()
        assert alive == [0]
        with pytest.raises(OutOfMemory, match=r"GPU does not suffice: take a smaller batch_size \(now 6\)"):
            round_of(coordinator, {runner.name: runner}, 2)
        runner.recover()
    round_of(coordinator, runners, 2)
    assert {parameter.device.type for parameter in runner.models.parameters()} == {"cpu"}


@dataclass(frozen=True, kw_only=True)
class Greedy(FedAvg):
    """One hospital's second round asks for more memory than there is."""

    def local_round(self, site: Site) -> None:
        if (site.name, site.round) == ("berta", 2):
            torch.empty(2**55, device=site.device)
        super().local_round(site)


def test_a_job_goes_on_when_one_hospital_s_memory_does_not_suffice(
    device: str, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    sites = {name: table_sites[name] for name in ("anna", "berta")}
    job = Job("small", 1, Settings(rounds=3, references=(), finetune=0), {}, Greedy(batch_size=6), normed())
    simulate(job, sites, tmp_path / "results", tmp_path / "home")
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    told = [event for event in summary["events"] if event["site"] == "berta"]
    assert [event["round"] for event in told[:2]] == [2, 3]
    where = "GPU" if device == "cuda" else "memory"
    assert where in told[0]["event"] and "batch_size (now 6) or smaller images or patches" in told[0]["event"]
    assert "resumed from the state after round 1" in told[1]["event"]
    assert {line["site"] for line in summary["test"]} >= {"anna", "berta"}


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_70", "sm_80", "sm_90"], (8, 6), True),
        (["sm_70", "sm_80", "sm_90"], (6, 1), False),
        (["sm_75", "sm_80"], (9, 0), False),
        (["sm_75", "compute_80"], (9, 0), True),
        (["sm_86"], (8, 0), False),
        (["sm_90a", "sm_120"], (12, 0), True),
        ([], (9, 0), False),
    ],
)
def test_machine_code_runs_on_later_minor_numbers_only(
    built: list[str], capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(built, *capability) is runs
