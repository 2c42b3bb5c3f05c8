# SPDX-License-Identifier: Apache-2.0
"""DynUNet: the U-Net of nnU-Net, whose levels may divide each axis by another number."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.norms import Norm, with_norm
from medpfl.models.options import axes_of, share, whole

_SUPERVISED = 2
"""Maps below the largest that deep supervision looks at, as far as there are so many above the two lowest levels."""


class DynUNetLevels(nn.Module):
    """The blocks of MONAI's DynUNet, each once, under MONAI's names; MONAI's own module lists them twice.

    In training, a network with deep supervision gives the scores of several levels: a list of maps B x C x ..., the
    largest, of the input's size, first. In evaluation it gives the largest alone.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.input_block = network.get_submodule("input_block")
        self.downsamples = _list(network, "downsamples")
        self.bottleneck = network.get_submodule("bottleneck")
        self.upsamples = _list(network, "upsamples")
        supervised = hasattr(network, "deep_supervision_heads")
        self.deep_supervision_heads = _list(network, "deep_supervision_heads") if supervised else nn.ModuleList()
        self.output_block = network.get_submodule("output_block")  # last: it is the head

    def forward(self, inputs: Tensor) -> Tensor | list[Tensor]:
        features = self.input_block(inputs)
        skipped = [features]
        for down in self.downsamples:
            skipped.append(down(skipped[-1]))
        features, maps = self.bottleneck(skipped[-1]), []
        for up, beside in zip(self.upsamples, reversed(skipped), strict=True):
            features = up(features, beside)
            maps.append(features)
        result: Tensor = self.output_block(features)
        if not self.training or not len(self.deep_supervision_heads):
            return result
        smaller = zip(self.deep_supervision_heads, reversed(maps[:-1]), strict=False)
        return [result, *(head(found) for head, found in smaller)]


def _list(network: nn.Module, name: str) -> nn.ModuleList:
    found = network.get_submodule(name)
    assert isinstance(found, nn.ModuleList)
    return found


@dataclass(frozen=True)
class DynUNet(Architecture):
    """MONAI's DynUNet (Isensee et al., "nnU-Net", Nature Methods 2021), in 2-D or 3-D.

    Args:
        filters: channels from the top level down, 3 levels or more.
        strides: by how much each level after the first divides each axis, [[2, 2, 2], [1, 2, 2]] say; none: every axis
            by 2.
        kernels: each level's kernel, an odd length an axis; none: 3 along every axis.
        norm: kind of normalisation.
        residual: blocks with a shortcut.
        deep_supervision: in training also the maps of half and a quarter of the size (one of them with 3 levels) are
            compared with the labels.
        dropout: share of the features that is left out in training, in [0, 1).
    """

    filters: tuple[int, ...] = (16, 32, 64)
    strides: tuple[tuple[int, ...], ...] = ()
    kernels: tuple[tuple[int, ...], ...] = ()
    norm: Norm = "instance"
    residual: bool = False
    deep_supervision: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if len(self.filters) < 3:
            raise ConfigError(f"DynUNet's filters: at least 3 levels are needed, got {list(self.filters)}")
        whole(self, "filters")
        whole(self, "strides", most=4)
        whole(self, "kernels", most=7)
        share(self)
        if any(length % 2 == 0 for kernel in self.kernels for length in kernel):
            raise ConfigError(f"DynUNet's kernels must have odd lengths, got {[list(one) for one in self.kernels]}")
        levels = len(self.filters)
        for name, entries, wanted in (("strides", self.strides, levels - 1), ("kernels", self.kernels, levels)):
            if entries and len(entries) != wanted:
                raise ConfigError(
                    f"DynUNet's {name} must be {wanted} lists for the {levels} levels of its filters, got "
                    f"{len(entries)}"
                )
            if len({len(entry) for entry in entries}) > 1:
                raise ConfigError(f"DynUNet's {name} must all have one number an axis, got {[*map(list, entries)]}")

    @property
    def multiple(self) -> int:
        return math.lcm(*self.multiples(len(self.strides[0]) if self.strides else 3))

    def multiples(self, axes: int) -> tuple[int, ...]:
        return tuple(math.prod(level) for level in zip(*self._strides(axes), strict=True))

    def _strides(self, axes: int) -> list[tuple[int, ...]]:
        found = list(self.strides) or [(2,) * axes] * (len(self.filters) - 1)
        if len(found[0]) != axes:
            raise ConfigError(f"DynUNet's strides are for {len(found[0])} axes, the inputs have {axes}")
        return found

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs C x H x W or C x D x H x W."""
        from monai.networks.nets import DynUNet as Network

        axes = axes_of(self, input_shape)
        strides = self._strides(axes)
        kernels = list(self.kernels) or [(3,) * axes] * len(self.filters)
        if len(kernels[0]) != axes:
            raise ConfigError(f"DynUNet's kernels are for {len(kernels[0])} axes, the inputs have {axes}")
        network = Network(
            axes,
            input_shape[0],
            outputs,
            kernels,
            [(1,) * axes, *strides],
            strides,
            filters=self.filters,
            dropout=self.dropout or None,
            norm_name=("batch", {"affine": True}),
            deep_supervision=self.deep_supervision,
            deep_supr_num=min(_SUPERVISED, len(self.filters) - 2),
            res_block=self.residual,
        )
        return with_norm(DynUNetLevels(network), self.norm, input_shape)
