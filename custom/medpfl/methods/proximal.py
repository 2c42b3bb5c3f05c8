# SPDX-License-Identifier: Apache-2.0
"""The proximal term that several methods share."""

from typing import Any

import torch
from torch import Tensor, nn


class Proximal:
    """strength/2 ||w - a||^2 over a network's parameters; its gradient is strength (w - a).

    Args:
        model: the network whose parameters are w; read at every call.
        strength: >= 0.
        anchor: the network whose parameters, as they are now, are a; None: ``model`` itself.
    """

    def __init__(self, model: nn.Module, strength: float, anchor: nn.Module | None = None):
        self._weights, self._strength = list(model.parameters()), strength
        self._anchor = [weight.detach().clone() for weight in (anchor or model).parameters()]

    def __call__(self) -> Tensor:
        """The term; it can be differentiated once."""
        term: Tensor = _Term.apply(self._strength, self._anchor, *self._weights)  # type: ignore[no-untyped-call]
        return term


class _Term(torch.autograd.Function):
    """Autograd's own way would walk through all weights five times; with a small batch that is half a step's time."""

    @staticmethod
    def forward(ctx: Any, strength: float, anchor: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.strength = strength
        ctx.distances = torch._foreach_sub(weights, anchor)
        squares: list[Tensor] = [distance.square().sum() for distance in ctx.distances]
        return strength / 2 * sum(squares[1:], start=squares[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        distances, ctx.distances = ctx.distances, None
        torch._foreach_mul_(distances, gradients[0] * ctx.strength)
        return None, None, *distances
