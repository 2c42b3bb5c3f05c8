# SPDX-License-Identifier: Apache-2.0
"""pFedMe's server step moves weights alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from baselines import begin, play, served
from medpfl.core.mixers import RelaxedMean
from medpfl.data.samples import SiteData
from medpfl.job import Job
from medpfl.methods.pfedme import PFedMe
from medpfl.tasks.tabular import Tabular
from one_slot import OneSlot


def test_statistics_of_batch_norm_become_the_mean() -> None:
    """With beta 2 a variance that fell from 1 to 0.4 became -0.2, and what the common model says NaN."""
    start = {
        "norm.weight": torch.tensor([1.0]),
        "norm.running_mean": torch.tensor([0.0]),
        "norm.running_var": torch.tensor([1.0]),
        "norm.num_batches_tracked": torch.tensor(3),
    }
    buffers = [key for key in start if key != "norm.weight"]
    server = OneSlot(RelaxedMean(beta=2.0), start, {"a": 30.0, "b": 10.0}, buffers=buffers)
    sent = [
        {**start, "norm.weight": torch.tensor([0.4]), "norm.running_var": torch.tensor([variance])}
        for variance in (0.5, 0.1)
    ]
    mixed, _ = server.mix(sent)
    for state in mixed:
        torch.testing.assert_close(state["norm.weight"], torch.tensor([-0.2]))
        torch.testing.assert_close(state["norm.running_var"], torch.tensor([0.4]))
        torch.testing.assert_close(state["norm.running_mean"], torch.tensor([0.0]))
        assert state["norm.num_batches_tracked"] == 3


class MeanSquare(nn.Module):
    """Divides by the root of its inputs' mean square, which it keeps: a normalisation that is none of torch's."""

    square: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("square", torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.square.mul_(0.2).add_(inputs.square().mean(dim=0), alpha=0.8)
        return inputs / self.square.sqrt()


@dataclass(frozen=True)
class Scaled(Tabular):
    def network(self, data: SiteData) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), MeanSquare(4), nn.ReLU(), nn.Linear(4, 1))


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_what_a_layer_of_another_package_keeps_becomes_the_mean(
    beta: float, make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = PFedMe(lr=0.02, batch_size=8, lam=2.0, outer_lr=0.2, optimizer="sgd")
    job = make_job(method=method, mixers={"global": RelaxedMean(beta=beta)}, task=Scaled(dataset="blood"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    before = served(coordinator, "global")
    sent = play(coordinator, runners, 1)
    sizes = {site: len(runner.data.splits["train"]) for site, runner in runners.items()}
    after = served(coordinator, "global")
    for key in after:
        mean = sum(sizes[site] * sent[site]["global"][f"global.{key}"] for site in sizes) / sum(sizes.values())
        expected = mean if key == "1.square" else (1 - beta) * before[key] + beta * mean
        torch.testing.assert_close(after[key], expected, atol=1e-6, rtol=0)
