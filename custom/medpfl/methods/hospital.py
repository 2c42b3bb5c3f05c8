# SPDX-License-Identifier: Apache-2.0
"""What a hospital holds in a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from medpfl.data.resident import Resident
from medpfl.data.samples import SiteData
from medpfl.methods.precision import Scalers
from medpfl.methods.presented import Presented
from medpfl.privacy.lots import RecordNoise
from medpfl.tasks.contract import Task


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Hospital:
    """What a hospital holds in a run, whatever the round and the method.

    Attributes:
        models: all networks, on the ``device``.
        optimizers: by network; a missing one is made when it is first needed.
        scalers: of float16's gradients, likewise.
        roster: the hospitals' names; ``name`` is this one's.
        seed: the job's.
        stopped: whether the job was aborted.
        checkpoints: name to tensors, of the checkpoints that the method uses; the same at every hospital.
        public: name to inputs, N x ..., of the method's public datasets; the same at every hospital, not on the device.
        kept: what methods ``keep`` of the data in this process.
        presented: the round's augmented batches, which all networks of the round see.
        resident: what of the data lies on the ``device``; None: nothing stays there.
        noise: record-level privacy of the training that is under way; None: there is none.
        least_count: cases behind a share that leaves (of a class, say); fewer are told as part of the most frequent.
    """

    task: Task
    data: SiteData
    models: nn.ModuleDict
    device: torch.device
    roster: tuple[str, ...]
    name: str
    seed: int
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    scalers: Scalers = field(default_factory=dict)
    stopped: Callable[[], bool] = _never
    checkpoints: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    public: Mapping[str, Tensor] = field(default_factory=dict)
    kept: dict[str, object] = field(default_factory=dict)
    presented: Presented = field(default_factory=Presented)
    resident: Resident | None = None
    noise: RecordNoise | None = None
    least_count: int = 1
