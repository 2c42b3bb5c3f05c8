# SPDX-License-Identifier: Apache-2.0
"""What tasks and kinds of datasets exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class NewCase:
    """A case to predict.

    Attributes:
        name: its file (and row).
        inputs: N x ... samples, prepared as in training; several for slices of a volume or windows of a recording.
        save: writes a segmentation from the network's outputs (N x C x ...) into a folder, in the input's geometry, on
            request with probabilities, and returns what to tell about it; None for tasks with one class a case.
    """

    name: str
    inputs: Tensor
    save: Callable[[Tensor, Path, list[str], bool], dict[str, Any]] | None = None
