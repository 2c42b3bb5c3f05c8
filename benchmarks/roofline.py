# SPDX-License-Identifier: Apache-2.0
"""How fast a device multiplies matrices, and how many multiplications a training step is made of."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

_TURNS = 5


def peak(device: torch.device, precision: str, now: Callable[[torch.device], float]) -> float:
    """Operations a second of one large product of matrices in this format, the best of a few: what nothing that is
    trained here can go beyond, as far as it is made of products (float32 without TF32).

    Args:
        now: seconds, when the device is done with all it was given.
    """
    side = 8192 if device.type == "cuda" else 512
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(_TURNS):
        started = now(device)
        for _ in range(_TURNS):
            torch.mm(one, one)
        best = min(best, (now(device) - started) / _TURNS)
    return 2 * side**3 / best


def operations(step: Callable[[], None]) -> int:
    """Additions and multiplications in the products and convolutions of a step, forward and backward."""
    with FlopCounterMode(display=False) as counted:
        step()
    return int(counted.get_total_flops())
