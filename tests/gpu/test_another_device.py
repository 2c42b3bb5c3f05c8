# SPDX-License-Identifier: Apache-2.0
"""Every method's whole job on a device that is not the processor: nothing is left on the wrong one, no bit differs."""

import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from elsewhere import DEVICE, Elsewhere, There
from every_method import EVERY, Small, write_both
from medpfl.rounds.simulate import simulate

SGD = torch.optim.SGD
QUICK = {"FedAvg", "FedSM"}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def done(small: Small, sites: dict[str, Path], folder: Path) -> tuple[Any, ...]:
    """Losses, validation and tests of a job, and what its hospitals keep."""
    simulate(small.job(precision="fp32"), sites, folder / "results", folder / "home")
    lines = [json.loads(line) for line in (folder / "results" / "metrics.jsonl").read_text().splitlines()]
    told = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    summary = json.loads((folder / "results" / "summary.json").read_text())
    kept = sorted(file.relative_to(folder) for file in (folder / "home").rglob("*.csv"))
    return told, summary["test"], summary["events"], {str(file): (folder / file).read_text() for file in kept}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EVERY]
)
def test_a_job_on_another_device_is_the_same_to_the_bit(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, training, further exchanges, validation, state on disk, fine-tuning and tests; data stay there."""
    small = EVERY[name]
    expected = done(small, sites[small.images], tmp_path / "here")
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type])
    monkeypatch.setattr("medpfl.rounds.site.training_device", lambda *_, **__: DEVICE)
    monkeypatch.setattr("medpfl.rounds.site.bytes_for_data", lambda *_: 2**20)
    # Tensors of one's own know no inference mode.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else nullcontext())
    with Elsewhere():
        found = done(small, sites[small.images], tmp_path / "there")
    assert found == expected and found[1] and found[3]


def test_the_other_device_tells_what_was_left_behind() -> None:
    with Elsewhere():
        weights = torch.ones(3).to(DEVICE)
        assert isinstance(weights, There) and weights.device == DEVICE and weights.cpu().tolist() == [1, 1, 1]
        assert float((weights * 2).sum()) == 6
        assert isinstance(torch.zeros(2, device=DEVICE), There)
        with pytest.raises(RuntimeError, match="same device"):
            weights + torch.ones(3)
