# SPDX-License-Identifier: Apache-2.0
"""What MONAI's transformers ask of the package einops, for machines without it: three changes of the order of axes."""

import importlib.util

from torch import Tensor, nn


def without_einops() -> None:
    """Let MONAI's transformers be built where einops is not installed; nothing where it is."""
    from monai.networks.blocks import selfattention
    from monai.networks.nets import swin_unetr

    if importlib.util.find_spec("einops") is None:
        selfattention.Rearrange, swin_unetr.rearrange = _Rearrange, _permuted


def _permuted(tensor: Tensor, pattern: str) -> Tensor:
    """The axes in another order, as in "n c h w -> n h w c"."""
    before, after = (side.split() for side in pattern.split("->"))
    return tensor.permute([before.index(axis) for axis in after])


class _Rearrange(nn.Module):
    """Heads of the attention apart (B x N x 3 L D to 3 x B x L x N x D), or side by side (B x L x N x D to
    B x N x L D)."""

    def __init__(self, pattern: str, qkv: int = 1, l: int = 1):  # noqa: E741 (the names are MONAI's)
        super().__init__()
        if pattern not in ("b h (qkv l d) -> qkv b l h d", "b l h d -> b h (l d)"):
            raise NotImplementedError(f"the rearrangement '{pattern}' needs the package einops")
        self._apart, self._parts = pattern.startswith("b h"), (qkv, l)

    def forward(self, tensor: Tensor) -> Tensor:
        if self._apart:
            return tensor.reshape(*tensor.shape[:2], *self._parts, -1).permute(2, 0, 3, 1, 4)
        return tensor.transpose(1, 2).flatten(2)
