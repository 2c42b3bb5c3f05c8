# SPDX-License-Identifier: Apache-2.0
"""What a network decides of the samples of a split: batch by batch, or case by case where cases differ in shape."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from medpfl.core.seeding import seed_torch
from medpfl.data.resident import case_of, part_of
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.models.outputs import check_classes, check_outputs
from medpfl.tasks.contract import Task

BATCH = 64
"""Samples that are evaluated together."""


def decide_samples(
    task: Task,
    forward: Callable[[Tensor], Tensor],
    samples: Samples,
    device: torch.device,
    numbers: Tensor | None = None,
) -> Tensor:
    """The task's decisions about a non-empty split, on the CPU: N x ..., or, of whole cases that differ in shape, those
    about all voxels, one case after another (``Samples.masks`` reads them). A network that draws numbers in evaluation,
    too (dropout that is never off, say), draws the same of the same samples whatever was drawn before.

    Args:
        forward: the network, in evaluation mode on the ``device``: B x ... to B x ...
        numbers: of the samples to decide, ascending; None: all.

    Raises:
        ConfigError: the network gives something else than a task can decide on.
    """
    whole = isinstance(samples.inputs, CaseRows)
    decisions = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        seed_torch("decisions")
        for inputs in _parts(samples, numbers, device):
            outputs = task.infer(forward, inputs)
            check_outputs(outputs)
            decided = task.decide(outputs).cpu()
            if task.spec.target is Target.CLASS and decided.ndim == 2:
                check_classes(decided, samples.classes)
            decisions.append(decided.flatten() if whole else decided)
    return torch.cat(decisions)


def _parts(samples: Samples, numbers: Tensor | None, device: torch.device) -> Iterator[Tensor]:
    inputs = samples.inputs
    if isinstance(inputs, CaseRows):
        for number in range(len(samples)) if numbers is None else numbers.tolist():
            yield case_of(inputs, number, device)[None]
    elif numbers is None:
        for start in range(0, len(samples), BATCH):
            yield part_of(inputs, slice(start, start + BATCH), device)
    else:
        for part in torch.split(numbers, BATCH):
            yield part_of(inputs, part, device)
