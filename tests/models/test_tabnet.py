# SPDX-License-Identifier: Apache-2.0
"""TabNet and the other networks of pFedNet's experiments."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from baselines import begin, play
from medpfl import store
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.graph import complete
from medpfl.core.groups import head_of
from medpfl.core.mixers import Mixer, NetworkProx
from medpfl.core.mixers import SoftPull as SoftPullMixer
from medpfl.core.network_lasso import solve_gram
from medpfl.core.tied import first_names, own_state
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.methods.apfl import APFL
from medpfl.methods.contract import Method
from medpfl.methods.cusfl import CusFL
from medpfl.methods.l2gd import L2GD
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.softpull import SoftPull
from medpfl.models.contract import Architecture
from medpfl.models.dnet import DNet
from medpfl.models.tabnet import Network, TabNet, sparsemax
from medpfl.models.unet import BasicUNet
from medpfl.tasks.contract import Task
from medpfl.tasks.tabular import Tabular
from tools import run


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_sparsemax_is_the_nearest_point_of_the_simplex(row: list[float]) -> None:
    scores = torch.tensor([row], dtype=torch.float64)
    found = sparsemax(scores)[0]
    assert (found >= 0).all() and found.sum() == pytest.approx(1)
    # The nearest point is the best of those that some support allows: all supports are tried.
    best = float("inf")
    for size in range(1, len(row) + 1):
        for chosen in itertools.combinations(range(len(row)), size):
            point = torch.zeros(len(row), dtype=torch.float64)
            kept = scores[0, list(chosen)]
            point[list(chosen)] = kept - (kept.sum() - 1) / size
            if (point >= 0).all():
                best = min(best, float((point - scores[0]).square().sum()))
    assert float((found - scores[0]).square().sum()) == pytest.approx(best, abs=1e-9)


def test_masks_are_sparse_and_move_on() -> None:
    torch.manual_seed(0)
    network = TabNet(width=4, steps=3, gamma=1.0).build((6,), 2)
    assert isinstance(network, Network)
    with torch.no_grad():
        network.attention[0][0].weight *= 1e4  # type: ignore[index, operator]
        network.attention[1][0].weight.zero_()  # type: ignore[index, operator]
        network.attention[1][1].bias.fill_(10.0)  # type: ignore[index, operator]
    masks, decided = network.eval().masks(torch.randn(20, 6))
    assert len(masks) == 3 and decided.shape == (20, 4) and (decided >= 0).all()
    for mask in masks:
        torch.testing.assert_close(mask.sum(dim=1), torch.ones(20))
    # gamma 1: a feature that one step looked at with its whole weight has score 0 in the next, where others have 10.
    whole = (masks[0] == 1).any(dim=1)
    assert whole.any()
    torch.testing.assert_close(masks[1][whole], (1 - masks[0][whole]) / 5)


def test_steps_share_the_linear_layers_of_the_first_two() -> None:
    network = TabNet(width=4, steps=2).build((6,), 1)
    first, second = network.transformers[0], network.transformers[1]  # type: ignore[union-attr, index]
    assert first.layers[1].linear is second.layers[1].linear and first.layers[2].linear is not second.layers[2].linear
    assert first.layers[0].norm is not second.layers[0].norm
    names = [name for name, _ in network.named_parameters()]
    assert len(set(names)) == len(names) and head_of(network) == "head"


@pytest.mark.slow
def test_it_learns_what_no_line_can() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(256, 5)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    network = TabNet().build((5,), 2)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    assert (network.eval()(inputs).argmax(dim=1) == labels).float().mean() > 0.9


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"TabNet's gamma must be at least 1, got 0.5"):
        TabNet(gamma=0.5)
    with pytest.raises(ConfigError, match="rows of a table"):
        TabNet().build((3, 8, 8), 2)
    with pytest.raises(ConfigError, match="'hidden' is of the perceptron"):
        Tabular(dataset="blood", hidden=(3,), architecture=TabNet())
    with pytest.raises(ConfigError, match=r"'medpfl.core.mixers.Mean' is no Architecture"):
        bad = {"dataset": "blood", "architecture": {"path": "medpfl.core.mixers.Mean"}}
        build({"path": "medpfl.tasks.tabular.Tabular", "args": bad}, Task, "task")
    assert build(spec_of(TabNet(width=3)), Architecture, "here") == TabNet(width=3)
    task = Tabular(dataset="blood", architecture=TabNet(steps=2))
    assert build(spec_of(task), Task, "task") == task


@pytest.mark.slow
def test_a_table_is_learnt_with_it(make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path) -> None:
    task = Tabular(dataset="blood", architecture=TabNet(width=4, steps=2))
    found = run(replace(make_job(rounds=2), task=task), table_sites, tmp_path)
    assert found["best"]["personal"]["score"] > 0.5


@pytest.mark.slow
def test_layers_that_steps_share_travel_and_are_kept_once(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    task = Tabular(dataset="blood", architecture=TabNet(width=4, steps=2))
    mixers: dict[str, Mixer] = {"personal": NetworkProx(tau=0.5, graph="complete")}
    method = PFedNet(lr=0.05, batch_size=8, personal=("",))
    coordinator, runners = begin(make_job(task=task, mixers=mixers, method=method), table_sites, tmp_path)
    network = runners["anna"].models["model"]
    single = [*dict(network.named_parameters()), *dict(network.named_buffers())]  # torch lists each once
    assert len(single) < len(network.state_dict())
    sent = play(coordinator, runners, 1)
    for states in sent.values():
        assert sorted(states["personal"]) == sorted(f"model.{name}" for name in single)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*network.parameters(), *network.buffers()))
    assert coordinator.payload_bytes("anna") == size
    assert {line.raw for line in coordinator.record.bytes} == {size}
    # The distances that the server's matrix is made of count each tensor once.
    floats = [[t for t in sent[site]["personal"].values() if t.is_floating_point()] for site in runners]
    stack = torch.stack([torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in floats])
    centred = (stack - stack.mean(dim=0)).numpy()
    expected = solve_gram(centred @ centred.T, complete(4), 0.5).matrix
    np.testing.assert_allclose(coordinator.record.matrices["personal/00001"], expected, atol=1e-6)
    play(coordinator, runners, 2)  # what came back is in every layer
    first, second = network.transformers[0], network.transformers[1]  # type: ignore[union-attr, index]
    assert first.layers[0].linear.weight is second.layers[0].linear.weight


@pytest.mark.slow
@pytest.mark.parametrize("kind", [APFL, L2GD, PerFedAvg, CusFL, SoftPull])
def test_any_method_takes_shared_layers(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path, kind: type[Method]
) -> None:
    task = Tabular(dataset="blood", architecture=TabNet(width=4, steps=2))
    more = {L2GD: {"optimizer": "sgd", "p": 0.5}, CusFL: {"split": "transformers.2"}}
    method = kind(lr=0.05, batch_size=8, **more.get(kind, {}))  # type: ignore[arg-type]
    usual = method.components()
    slots: dict[str, Mixer] = {slot: SoftPullMixer(lam=0.5) if kind is L2GD else mixer for slot, mixer in usual.items()}  # type: ignore[misc]
    run(make_job(task=task, mixers=slots, method=method, rounds=2), table_sites, tmp_path)
    for path in (tmp_path / "home").glob("*/small/models/*.safetensors"):
        model, tensors = load_deployed(path), store.read(path)[0]
        assert sorted(tensors) == sorted(own_state(model.networks))
        state = model.networks.state_dict()
        for key, name in first_names(model.networks).items():
            assert torch.equal(state[key], tensors[name])


def test_sizes_of_the_papers_networks() -> None:
    network = DNet().build((3, 32, 32), 2)
    assert head_of(network) == "class_layers.out"
    assert sum(p.numel() for p in network.get_submodule("class_layers.out").parameters()) == 344  # the paper's personal
    unet = BasicUNet().build((2, 64, 64), 2)
    children = [name for name, _ in unet.named_children()]
    assert children == [
        "conv_0",
        *(f"down_{i}" for i in range(1, 5)),
        *(f"upcat_{i}" for i in (4, 3, 2, 1)),
        "final_conv",
    ]
