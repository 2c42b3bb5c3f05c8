# SPDX-License-Identifier: Apache-2.0
"""A network that is planned when the job starts, from what the hospitals' volumes are like."""

from dataclasses import dataclass

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.norms import Norm
from medpfl.models.options import whole


@dataclass(frozen=True)
class Auto(Architecture):
    """nnU-Net's network (``DynUNet`` with deep supervision), whose levels, strides and kernels the server plans by
    nnU-Net's rules (``tasks.planning``), with the patch, the spacing and the batch.

    Args:
        features: channels of the first level; every level doubles them, up to ten times as many. 32 is nnU-Net's, for
            a GPU.
        norm: kind of normalisation; some methods need "batch".
    """

    features: int = 32
    norm: Norm = "instance"

    def __post_init__(self) -> None:
        whole(self, "features")

    @property
    def multiple(self) -> int:
        """Known when it is planned."""
        return 1

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        raise ConfigError(
            "the network is planned when the job starts, from what the hospitals tell of their volumes; where there is "
            "no such exchange, take what 'medpfl plan' writes"
        )
