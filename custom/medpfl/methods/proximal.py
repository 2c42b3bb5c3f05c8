# SPDX-License-Identifier: Apache-2.0
"""Terms of a loss whose gradient is known: it is added to that of the weights, and autograd never sees the term.

Autograd would walk through all weights some five times; with a small batch that is half a step's time.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class Proximal:
    """strength/2 ||w - a||^2 over a network's parameters. A call adds strength (w - a) to their gradients.

    Args:
        model: the network whose parameters are w; read at every call.
        strength: >= 0.
        anchor: the network whose parameters, as they are now, are a; None: ``model`` itself.
    """

    def __init__(self, model: nn.Module, strength: float, anchor: nn.Module | None = None):
        pairs = zip(model.parameters(), (anchor or model).parameters(), strict=True)
        trained = [(weight, held) for weight, held in pairs if weight.requires_grad]  # others may be no numbers
        self._weights: list[Tensor] = [weight for weight, _ in trained]
        self._anchor = [held.detach().clone() for _, held in trained]
        self.strength = strength

    @torch.no_grad()
    def __call__(self) -> None:
        add_gradient(self._weights, torch._foreach_sub(self._weights, self._anchor), self.strength)


@torch.no_grad()
def add_gradient(weights: Iterable[Tensor], values: Sequence[Tensor], factor: float = 1.0) -> None:
    """Add ``factor`` times ``values`` to the gradients of the weights that are trained, reached by a loss or not."""
    gradients, added = [], []
    for weight, value in zip(weights, values, strict=True):
        if weight.requires_grad:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad)
            added.append(value)
    if gradients:
        torch._foreach_add_(gradients, added, alpha=factor)
