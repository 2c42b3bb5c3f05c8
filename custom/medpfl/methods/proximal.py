# SPDX-License-Identifier: Apache-2.0
"""The proximal term that several methods share."""

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
        pairs = zip(self._weights, self._anchor, strict=True)
        distances: list[Tensor] = [(weight - anchor).square().sum() for weight, anchor in pairs]
        return self._strength / 2 * sum(distances[1:], start=distances[0])
