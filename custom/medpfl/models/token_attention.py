# SPDX-License-Identifier: Apache-2.0
"""MH-pFLID's information receiver and transmitter (Xie et al., ICML 2024, Section 3.3 and Figure 3).

Both bring the local features to the messenger's dimensions (W_d) and let one of the two maps ask the other. The paper
leaves open over what the attention runs: here over the positions of one sample's map, so that a result does not depend
on the other samples of its batch, and labels cannot leak between them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError

_POOL: dict[int, Callable[..., Tensor]] = {
    1: nn.functional.adaptive_avg_pool1d,
    2: nn.functional.adaptive_avg_pool2d,
    3: nn.functional.adaptive_avg_pool3d,
}


class TokenAttention(nn.Module):
    """softmax(Q K^T / sqrt(D)) V over the positions of the messenger's map.

    The receiver has its queries from the messenger and its keys and values from the local features; the transmitter
    the other way round.

    Args:
        local: channels of the local map.
        width: D, channels of the messenger's map.
        queries: whose features ask: "messenger" (receiver) or "local" (transmitter).
    """

    def __init__(self, local: int, width: int, queries: str):
        super().__init__()
        self.fit = nn.Linear(local, width)  # W_d
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.queries = queries

    def forward(self, local: Tensor, messenger: Tensor) -> Tensor:
        """``local``: B x C x ...; ``messenger``: B x D x grid; returns B x D x grid."""
        mine = self.fit(tokens(on_grid(local, messenger)))
        theirs = tokens(messenger)
        asking, asked = (theirs, mine) if self.queries == "messenger" else (mine, theirs)
        query, key, value = self.query(asking), self.key(asked), self.value(asked)
        weights = torch.softmax(query @ key.transpose(1, 2) / math.sqrt(query.shape[-1]), dim=-1)
        return as_map(weights @ value, messenger)

    def correlation(self) -> float:
        """Root mean square of the cosines between different rows of W_v: 0 for an orthogonal basis. Our reading of the
        paper's Table 8, which does not say what its basis B is."""
        rows = nn.functional.normalize(self.value.weight.detach().double(), dim=1)
        gram = rows @ rows.T
        gram.fill_diagonal_(0)
        count = len(gram)
        return float((gram.square().sum() / (count * (count - 1))).sqrt())


class Addition(nn.Module):
    """The ablation of Table 6: the two maps are added instead."""

    def __init__(self, local: int, width: int):
        super().__init__()
        self.fit = nn.Linear(local, width)

    def forward(self, local: Tensor, messenger: Tensor) -> Tensor:
        return messenger + as_map(self.fit(tokens(on_grid(local, messenger))), messenger)


def on_grid(local: Tensor, messenger: Tensor) -> Tensor:
    """The local map, B x C x ..., averaged onto the messenger's grid, in the number format of its map."""
    grid = messenger.shape[2:]
    if local.dim() != messenger.dim():
        raise ConfigError(
            f"the local features have the shape {tuple(local.shape)}, the messenger's {tuple(messenger.shape)}: both "
            "must be maps of as many dimensions"
        )
    return _POOL[len(grid)](local.to(messenger.dtype), grid if len(grid) > 1 else grid[0])


def tokens(features: Tensor) -> Tensor:
    """B x D x grid to B x positions x D."""
    return features.flatten(2).transpose(1, 2)


def as_map(rows: Tensor, like: Tensor) -> Tensor:
    """B x positions x D to the shape of ``like``, B x D x grid."""
    return rows.transpose(1, 2).reshape(like.shape)
