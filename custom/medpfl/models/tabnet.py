# SPDX-License-Identifier: Apache-2.0
"""TabNet: a table's features are looked at step by step, each step through a sparse mask of its own.

Arik, Pfister, "TabNet: Attentive Interpretable Tabular Learning", AAAI 2021, Section 3 and Fig. 4; sparsemax of
Martins, Astudillo, ICML 2016. Own code: the known packages bring training loops and files of their own that are
unpickled. Deviations: BatchNorm over the batch, not over ghost batches, which hospitals' batches are as small as; no
term for the masks' sparsity in the loss, which belongs to the task.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture


def sparsemax(scores: Tensor) -> Tensor:
    """The nearest point of the simplex to each row: non-negative, sum 1, many zeros. B x D to B x D."""
    ordered = scores.sort(dim=1, descending=True).values
    rank = torch.arange(1, scores.shape[1] + 1, device=scores.device, dtype=scores.dtype)
    total = ordered.cumsum(dim=1)
    support = (1 + rank * ordered > total).sum(dim=1, keepdim=True)
    threshold = (total.gather(1, support - 1) - 1) / support
    return (scores - threshold).clamp(min=0)


class Gated(nn.Module):
    """Linear, BatchNorm, gated linear unit; the linear layer may belong to several."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.norm = nn.BatchNorm1d(linear.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.glu(self.norm(self.linear(inputs)), dim=1)


class Transformer(nn.Module):
    """Two gated layers whose linear part all steps share, then two of the step's own; residuals scaled by sqrt(1/2)."""

    def __init__(self, shared: list[nn.Linear], width: int):
        super().__init__()
        own = [nn.Linear(width, 2 * width, bias=False) for _ in range(2)]
        self.layers = nn.ModuleList(Gated(linear) for linear in (*shared, *own))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers[0](inputs)
        for layer in self.layers[1:]:
            found = (found + layer(found)) * math.sqrt(0.5)
        return found


class Network(nn.Module):
    def __init__(self, features: int, outputs: int, width: int, steps: int, gamma: float):
        super().__init__()
        self.width, self.gamma = width, gamma
        self.norm = nn.BatchNorm1d(features)
        shared = [nn.Linear(before, 4 * width, bias=False) for before in (features, 2 * width)]
        self.transformers = nn.ModuleList(Transformer(shared, 2 * width) for _ in range(steps + 1))
        self.attention = nn.ModuleList(
            nn.Sequential(nn.Linear(width, features, bias=False), nn.BatchNorm1d(features)) for _ in range(steps)
        )
        self.head = nn.Linear(width, outputs)

    def masks(self, inputs: Tensor) -> tuple[list[Tensor], Tensor]:
        """Each step's mask, B x D, and the sum of what the steps decided, B x width."""
        features = self.norm(inputs)
        prior = torch.ones_like(features)
        attended = self.transformers[0](features)[:, self.width :]
        found, total = [], torch.zeros_like(attended)
        for look, transform in zip(self.attention, self.transformers[1:], strict=True):
            mask = sparsemax(look(attended) * prior)
            prior = prior * (self.gamma - mask)
            decided, attended = transform(mask * features).split(self.width, dim=1)
            total = total + decided.relu()
            found.append(mask)
        return found, total

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.masks(inputs)[1])
        return result


@dataclass(frozen=True)
class TabNet(Architecture):
    """TabNet for the rows of a table.

    Args:
        width: of the decision and of the attention, N_d = N_a, >= 1.
        steps: decision steps, >= 1.
        gamma: how far a feature may be looked at again in a later step, >= 1 (1: in one step only).
    """

    width: int = 8
    steps: int = 3
    gamma: float = 1.3

    def __post_init__(self) -> None:
        for name in ("width", "steps", "gamma"):
            if getattr(self, name) < 1:
                raise ConfigError(f"TabNet's {name} must be at least 1, got {getattr(self, name)}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs D."""
        if len(input_shape) != 1:
            raise ConfigError(f"TabNet needs the rows of a table, got inputs of the shape {input_shape}")
        return Network(input_shape[0], outputs, self.width, self.steps, self.gamma)
