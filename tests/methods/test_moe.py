# SPDX-License-Identifier: Apache-2.0
"""MoE: its common model is FedAvg's, its expert is local training's, and it predicts their mixture."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from baselines import assert_resumes, begin, held, play, same, served
from medpfl.core.mixers import Identity, Mean
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.methods.moe import Gate, MoE, mixture
from tools import Make, normed, run


def moe() -> MoE:
    return MoE(lr=0.05, batch_size=8)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(1,), (3,), (2, 4, 5)]))
def test_the_mixture_is_of_probabilities(seed: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate = 3 * torch.randn(4, 1, generator=generator)
    common, own = (3 * torch.randn(4, *shape, generator=generator) for _ in range(2))
    alpha = gate.sigmoid().reshape(4, *(1 for _ in shape))
    squash = torch.sigmoid if shape[0] == 1 else lambda logits: logits.softmax(dim=1)
    expected = alpha * squash(common) + (1 - alpha) * squash(own)
    torch.testing.assert_close(squash(mixture(gate, common, own)), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(squash(mixture(gate, common, common)), squash(common), atol=1e-5, rtol=1e-4)
    sure = torch.full_like(gate, 60.0)
    torch.testing.assert_close(squash(mixture(sure, common, own)), squash(common), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(squash(mixture(-sure, common, own)), squash(own), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [(12, 16), (4, 8), (5, 10)])
def test_the_gate_sees_slices_of_another_size_as_training_would(size: tuple[int, int]) -> None:
    """New slices come as large as they are; in training they were cut, or padded, to 8 x 8 about their middle."""
    gate, inputs = Gate((2, 8, 8)), torch.randn(3, 2, *size, generator=torch.Generator().manual_seed(0))
    assert list(gate.state_dict()) == ["1.weight", "1.bias"]  # as in files of models
    grid = torch.zeros(3, 2, 24, 24)
    top, left = (12 - length // 2 for length in size)
    grid[:, :, top : top + size[0], left : left + size[1]] = inputs
    torch.testing.assert_close(gate(inputs), gate(grid[:, :, 8:16, 8:16]))
    networks = nn.ModuleDict({"global": nn.Conv2d(2, 2, 1), "expert": nn.Conv2d(2, 2, 1), "gate": gate})
    assert moe().predict("personal", networks, inputs).shape == (3, 2, *size)


def test_extreme_outputs_stay_finite() -> None:
    for width in (1, 2):
        common = torch.full((2, width), 80.0, requires_grad=True)
        own = torch.full((2, width), -80.0)
        gate = torch.tensor([[50.0], [-50.0]], requires_grad=True)
        mixed = mixture(gate, common, own)
        mixed.sum().backward()
        assert torch.isfinite(mixed).all() and gate.grad is not None and torch.isfinite(gate.grad).all()


@pytest.mark.slow
def test_its_parts_are_fedavg_and_local_training(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"local": Identity(), "fedavg": Mean(), "global": Mean()}, method=moe(), task=normed())
    coordinator, runners = begin(job, table_sites, tmp_path)
    for number in (1, 2, 3):
        sent = play(coordinator, runners, number)
        assert same(served(coordinator, "global"), served(coordinator, "fedavg"))
        for site, runner in runners.items():
            assert same(held(runner, "expert"), held(runner, "local"))
            assert sent[site].keys() == {"fedavg", "global"}
            assert not any("expert" in key or "gate" in key for slot in sent[site].values() for key in slot)
    assert held(runners["anna"], "gate")["1.weight"].abs().max() > 0.01


@pytest.mark.slow
def test_it_predicts_the_mixture(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    result = run(make_job(mixers={"global": Mean()}, method=moe(), task=normed()), table_sites, tmp_path)
    assert {line["model"] for line in result["test"]} == {"personal", "global"}
    path = tmp_path / "home" / "berta" / "small" / "models" / "personal-last.safetensors"
    model, rows = load_deployed(path), torch.randn(6, 3)
    nets = model.networks
    alpha = nets["gate"](rows).sigmoid()
    expected = alpha * nets["global"](rows).sigmoid() + (1 - alpha) * nets["expert"](rows).sigmoid()
    torch.testing.assert_close(model(rows).sigmoid(), expected, atol=1e-5, rtol=1e-4)
    shares = [line["metrics"]["gate"] for line in result["scores"] if line["model"] == "gate"]
    # In round 1 both networks are one and the same, so there is nothing to choose.
    assert shares[:4] == [0.5] * 4 and all(0 < share < 1 and share != 0.5 for share in shares[4:]) and shares[4:]
    export(path, tmp_path / "exported", "torchscript")  # checks its own outputs


@pytest.mark.slow
def test_resuming(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: make_job(rounds=4, mixers={"global": Mean()}, method=moe()), table_sites, tmp_path)
