# SPDX-License-Identifier: Apache-2.0
"""Of ``benchmarks gpu``: seconds on a device, and parts that may fail."""

import time
from collections.abc import Callable
from typing import Any

import torch

from medpfl.core.errors import MedPFLError


def now(device: torch.device) -> float:
    """Seconds: of a GPU, when it is done with all it was given; of the processor its time, without other work's."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def attempted(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part of the measurement found; where it failed (a small card's memory, say) why, and the others go on."""
    try:
        return part()
    except (RuntimeError, OSError, MedPFLError) as error:
        told = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"failed": told}
