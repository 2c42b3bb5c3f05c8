# SPDX-License-Identifier: Apache-2.0
"""What ``medpfl site doctor`` says of a machine's GPUs, and of a torch that cannot use them."""

from pathlib import Path

import pytest
import torch

from medpfl.flare.gpus import Driven, gpus, seen_by_driver
from tools import require_gpu


def smi(folder: Path, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of NVIDIA's, which comes with its driver."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{says}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, "echo 'NVIDIA H200, 550.54.15'; echo 'NVIDIA A100, 80GB, 550.54.15'", monkeypatch)
    assert seen_by_driver() == [Driven("NVIDIA H200", "550.54.15"), Driven("NVIDIA A100, 80GB", "550.54.15")]


@pytest.mark.parametrize("says", ["echo 'Failed to initialize NVML'; exit 9", "echo 'No devices were found'"])
def test_a_driver_that_fails_is_none(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, says, monkeypatch)
    assert seen_by_driver() == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_torch_that_is_built_for_processors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, "echo 'NVIDIA H200, 550.54.15'", monkeypatch)
    (found,) = gpus()
    assert found.status == "note" and "(550.54.15) sees NVIDIA H200" in found.text
    assert "built for processors only" in found.text and "build of torch for CUDA" in found.mend


def test_a_gpu_that_cannot_be_used_now_does_not_end_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(number: int) -> tuple[int, int]:
        if number == 0:
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")
        return 3 * 2**30, 8 * 2**30

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_arch_list": lambda: ["sm_80"],
        "get_device_capability": lambda number: (8, 0),
        "get_device_name": lambda number: f"NVIDIA A100 number {number}",
        "mem_get_info": asked,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    busy, other = gpus()
    assert busy.status == "problem" and busy.text.endswith("busy or unavailable") and "number 0" in busy.text
    assert other.status == "ok" and "3 of 8 GiB free, compute capability 8.0" in other.text


@pytest.mark.cuda
def test_a_gpu_is_named_with_its_driver() -> None:
    require_gpu()
    for found in gpus():
        assert "compute capability" in found.text and "GiB free" in found.text and "driver" in found.text
