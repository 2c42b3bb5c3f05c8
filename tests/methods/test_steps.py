# SPDX-License-Identifier: Apache-2.0
"""What a local round is made of: its seeds, its batches' rows, its steps."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medpfl.core.mixers import Mean
from medpfl.core.seeding import derive_seed, seed_torch
from medpfl.data.rows import FileRows, take
from medpfl.data.samples import Samples
from medpfl.methods.fedavg import FedAvg
from medpfl.tasks.tabular import Tabular
from tools import Make, pieces, ready, round_of


def test_seeds_are_those_of_torch() -> None:
    torch.manual_seed(derive_seed(3, "anna", 7))
    wanted = torch.rand(5), torch.randperm(20)
    seed_torch(3, "anna", 7)
    assert torch.equal(torch.rand(5), wanted[0]) and torch.equal(torch.randperm(20), wanted[1])
    seed_torch(3, "anna", 8)
    assert not torch.equal(torch.rand(5), wanted[0])


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 4, 5)])
def test_rows_are_taken_by_number_from_memory_and_from_a_file(shape: tuple[int, ...]) -> None:
    rows, numbers = torch.randn(shape), torch.tensor([4, 0, 4, 5])
    with tempfile.TemporaryFile() as file:
        file.write(rows.numpy().tobytes())
        file.flush()
        on_disk = take(FileRows(file, rows[:0], len(rows)), numbers)
    taken = take(rows, numbers)
    assert torch.equal(taken, rows[numbers]) and torch.equal(on_disk, taken)
    taken.zero_()
    assert rows.count_nonzero() == rows.numel()  # a copy


def test_a_term_changes_the_step_and_not_the_loss_that_is_reported(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """It is called once a step, with the loss's gradient there and the weights not yet moved."""
    method = FedAvg(lr=0.5, batch_size=4, optimizer="sgd")
    job = make_job(mixers={"fedavg": Mean()}, method=method, task=Tabular(dataset="blood"))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    site = runners["anna"].rounds.site(method, 2)
    assert site.last_loss != site.last_loss  # NaN before the first step
    model = site.models["fedavg"]
    before = [weight.detach().clone() for weight in model.parameters()]
    found: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def term() -> None:
        weights = list(model.parameters())
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        found.append(([w.detach().clone() for w in weights], [g.clone() for g in gradients]))
        for gradient in gradients:
            gradient.add_(1)

    batches = list(site.training_batches())
    site.fit("fedavg", term)
    assert len(found) == len(batches) > 1
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], before, strict=True))
    (first, gradients), (second, _) = found[:2]
    for weight, gradient, moved in zip(first, gradients, second, strict=True):
        torch.testing.assert_close(moved, weight - 0.5 * (gradient + 1))
    with torch.no_grad():
        for weight, last in zip(model.parameters(), found[-1][0], strict=True):
            weight.copy_(last)
        assert site.last_loss == float(site.task.loss(model(batches[-1].inputs), batches[-1].targets))


@dataclass(frozen=True)
class Noted(Tabular):
    """Notes what each step is given to draw from."""

    drawn: dict[str, list[int]] = field(default_factory=dict, compare=False)

    def present(self, samples: Samples, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        self.drawn.setdefault("all", []).append(int(torch.randint(2**62, (), generator=generator)))
        return super().present(samples, chosen, generator)


def test_every_step_draws_from_a_generator_of_its_own_the_same_for_all_models_of_a_round(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """And the order of the samples does not depend on what was drawn."""
    task = Noted(dataset="blood")
    job = make_job(mixers={"fedavg": Mean()}, method=FedAvg(batch_size=4, epochs=2), task=task)
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)

    def drawn(name: str, number: int, purpose: str = "batches") -> tuple[list[int], list[Tensor]]:
        task.drawn.clear()
        inputs = [
            batch.inputs for batch in runners[name].rounds.site(job.method, number).training_batches(purpose=purpose)
        ]
        return task.drawn["all"], inputs

    first, batches = drawn("anna", 2)
    again, same = drawn("anna", 2)
    assert first == again and all(torch.equal(one, other) for one, other in zip(batches, same, strict=True))
    others = [drawn("anna", 3)[0], drawn("berta", 2)[0], drawn("anna", 2, "second")[0]]
    every = [seed for one in (first, *others) for seed in one]
    assert len(set(every)) == len(every)
    order = torch.Generator().manual_seed(derive_seed(job.settings.seed, "anna", 2, "batches"))
    samples = runners["anna"].data.splits["train"]
    rows = torch.cat([torch.randperm(len(samples), generator=order) for _ in range(2)])[: len(torch.cat(batches))]
    assert torch.equal(torch.cat(batches), take(samples.inputs, rows))
