# SPDX-License-Identifier: Apache-2.0
"""What a network decides of the samples of a split: batch by batch, or case by case where cases differ in shape."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mixing import a_kind
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
        ConfigError: the network gives something else than a task can decide on, or the task decides something else than
            its target has.
    """
    whole = isinstance(samples.inputs, CaseRows)
    decisions = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        seed_torch("decisions")
        for inputs in _parts(samples, numbers, device):
            outputs = task.infer(forward, inputs)
            check_outputs(outputs)
            decided = _checked(task, task.decide(outputs), outputs, samples.classes).cpu()
            decisions.append(decided.flatten() if whole else decided)
    return torch.cat(decisions)


def _checked(task: Task, decided: object, outputs: Tensor, classes: int) -> Tensor:
    """Decisions of a batch, as ``Target`` has them: N x 1 where N numbers are meant would be set against every case's
    answer by every metric, in silence."""
    target = task.spec.target
    if target is Target.CLASS and isinstance(decided, Tensor) and decided.ndim == 2:
        check_classes(decided, classes)
    each = {Target.CLASS: [classes], Target.LABELS: [classes], Target.MASK: list(outputs.shape[2:])}.get(target, [])
    expected = [len(outputs), *each]
    if not isinstance(decided, Tensor) or list(decided.shape) != expected:
        got = f"a tensor of the shape {list(decided.shape)}" if isinstance(decided, Tensor) else a_kind(decided)
        raise ConfigError(
            f"'decide' of {type(task).__name__} must give a tensor of the shape {expected}, {target.told}, got {got}"
        )
    return decided


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
