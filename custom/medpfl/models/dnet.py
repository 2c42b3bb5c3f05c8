# SPDX-License-Identifier: Apache-2.0
"""D-Net, the classifier of pFedNet's experiments: a narrow DenseNet for images of 32 x 32."""

from dataclasses import dataclass

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.monai_net import MonaiNet

_OPTIONS: dict[str, bool | int | float | list[int]] = {
    "init_features": 12, "growth_rate": 6, "block_config": [16, 16, 16], "bn_size": 4,
}  # fmt: skip
_SMALLEST = 16  # what the first layers and two poolings leave 1 x 1 of


@dataclass(frozen=True)
class DNet(Architecture):
    """MONAI's DenseNet with growth 6 and blocks of 16, 16 and 16 layers (Zhao et al., Section VI): 171 features, then
    one linear layer, the personal part.

    Deviation: MONAI's first layers (7 x 7 and pooling) leave a quarter of the lengths, which makes it quick on a CPU;
    the paper does not say what its own are.
    """

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs C x H x W of at least 16 x 16; the paper's are 32 x 32."""
        if min(input_shape[1:], default=0) < _SMALLEST:
            raise ConfigError(f"DNet needs inputs C x H x W of at least 16 x 16, got the shape {input_shape}")
        return MonaiNet("DenseNet121", _OPTIONS).build(input_shape, outputs)
