# SPDX-License-Identifier: Apache-2.0
"""Networks for segmentation: UNet and ResUNet, BasicUNet, UNet++, AttentionUnet, FCN. Inputs C x H x W, or but for FCN
C x D x H x W."""

from dataclasses import dataclass

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.memory_order import channels_last
from medpfl.models.norms import Norm, with_norm
from medpfl.models.options import axes_of, share, whole
from medpfl.models.residual import plane


@dataclass(frozen=True)
class UNet(Architecture):
    """MONAI's UNet (Ronneberger et al., MICCAI 2015); a ResUNet with ``residual_units``.

    Args:
        channels: from the top level down, 2 levels or more; each level halves the map.
        residual_units: residual units per level, 0 for plain convolutions (quicker on a CPU).
        norm: kind of normalisation.
        dropout: share of the features that is left out in training, in [0, 1).
    """

    channels: tuple[int, ...] = (16, 32, 64, 128)
    residual_units: int = 0
    norm: Norm = "batch"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))  # JSON has lists
        if len(self.channels) < 2:
            raise ConfigError(f"UNet's channels: at least 2 levels are needed, got {list(self.channels)}")
        if min(self.channels) < 1:
            raise ConfigError(f"UNet's channels must be at least 1, got {list(self.channels)}")
        if self.residual_units < 0:
            raise ConfigError(f"UNet's residual_units must be at least 0, got {self.residual_units}")
        whole(self, "channels")
        share(self)

    @property
    def multiple(self) -> int:
        return int(2 ** (len(self.channels) - 1))

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import UNet as Network

        network: nn.Module = Network(
            spatial_dims=len(input_shape) - 1,
            in_channels=input_shape[0],
            out_channels=outputs,
            channels=self.channels,
            strides=[2] * (len(self.channels) - 1),
            num_res_units=self.residual_units,
            norm="batch",
            dropout=self.dropout,
        )
        return with_norm(network, self.norm, input_shape)


class First(nn.Module):
    """A network that gives several tensors, of which the first is the result. It goes by the network's name."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.network(inputs)[0]
        return result

    def _get_name(self) -> str:
        return type(self.network).__name__


@dataclass(frozen=True)
class UNetPlusPlus(Architecture):
    """MONAI's UNet++ (Zhou et al., IEEE TMI 2019), four levels below the first.

    Args:
        features: channels of the five levels from the top, at least 2 from the third on, and of the last layer.
        norm: kind of normalisation.
        dropout: share of the features that is left out in training, in [0, 1).
    """

    features: tuple[int, ...] = (8, 8, 16, 32, 64, 8)
    norm: Norm = "batch"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists
        if len(self.features) != 6 or min(self.features) < 1 or min(self.features[2:5]) < 2:  # which are halved
            raise ConfigError(
                "UNetPlusPlus' features must be 6 numbers of at least 1, and the third to the fifth of at least 2, got "
                f"{list(self.features)}"
            )
        whole(self, "features")
        share(self)

    @property
    def multiple(self) -> int:
        return 16

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import BasicUNetPlusPlus

        axes, norm = axes_of(self, input_shape), ("batch", {"affine": True})
        network = BasicUNetPlusPlus(axes, input_shape[0], outputs, self.features, norm=norm, dropout=self.dropout)
        return channels_last(with_norm(First(network), self.norm, input_shape))


@dataclass(frozen=True)
class BasicUNet(Architecture):
    """MONAI's BasicUNet: five levels of two convolutions each, of pFedNet's U-Net at its default width.
    Its way down is conv_0, down_1 ... down_4, its way up upcat_4 ... upcat_1, final_conv.

    Deviation: the last layer gives scores; the released code puts a sigmoid before its cross-entropy.

    Args:
        width: channels of the top level; each level below has twice as many.
        norm: kind of normalisation.
    """

    width: int = 8
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"BasicUNet's width must be at least 1, got {self.width}")

    @property
    def multiple(self) -> int:
        return 16

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import BasicUNet as Network

        features = (*(self.width * 2**level for level in range(5)), self.width)
        network: nn.Module = Network(
            len(input_shape) - 1, input_shape[0], outputs, features, act="relu", norm=("batch", {"affine": True})
        )
        return channels_last(with_norm(network, self.norm, input_shape))


@dataclass(frozen=True)
class AttentionUnet(Architecture):
    """MONAI's Attention U-Net (Oktay et al., MIDL 2018), whose merging convolutions have instance norm in any case.

    Args:
        channels: from the top level down, 2 levels or more; each level halves the map.
        norm: kind of normalisation.
        dropout: share of the features that is left out in training, in [0, 1).
    """

    channels: tuple[int, ...] = (16, 32, 64, 128)
    norm: Norm = "batch"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if len(self.channels) < 2:
            raise ConfigError(f"AttentionUnet's channels: at least 2 levels are needed, got {list(self.channels)}")
        whole(self, "channels", least=2)
        share(self)

    @property
    def multiple(self) -> int:
        return int(2 ** (len(self.channels) - 1))

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import AttentionUnet as Network

        axes, strides = axes_of(self, input_shape), [2] * (len(self.channels) - 1)
        network = Network(axes, input_shape[0], outputs, self.channels, strides, dropout=self.dropout)
        return with_norm(network, self.norm, input_shape)


class Fcn(nn.Module):
    """Stages of two convolutions and pooling; the scores of the last three are added on the way up (FCN-8s)."""

    def __init__(self, channels: int, widths: tuple[int, ...], outputs: int):
        super().__init__()
        stages, scores = [], []
        for before, after in zip((channels, *widths), widths, strict=False):
            stages.append(
                nn.Sequential(
                    nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
                    nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
                    nn.MaxPool2d(2),
                )
            )  # fmt: skip
            scores.append(nn.Conv2d(after, outputs, 1))
        self.stages = nn.ModuleList(stages)
        self.scores = nn.ModuleList(scores[-3:])

    def forward(self, inputs: Tensor) -> Tensor:
        maps, features = [], inputs
        for stage in self.stages:
            features = stage(features)
            maps.append(features)
        result: Tensor | None = None
        for score, found in zip(reversed(self.scores), reversed(maps), strict=False):
            mine = score(found)
            result = mine if result is None else mine + _to(result, mine)
        assert result is not None
        return _to(result, inputs)


def _to(scores: Tensor, like: Tensor) -> Tensor:
    return nn.functional.interpolate(scores, size=like.shape[2:], mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class FCN(Architecture):
    """Fully convolutional network, FCN-8s (Long et al., CVPR 2015), with BatchNorm and bilinear upsampling.

    Args:
        widths: channels of each stage, 1 or more; each stage halves the map.
    """

    widths: tuple[int, ...] = (16, 32, 64, 128)

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))  # JSON has lists
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"FCN's widths must be 1 or more numbers of at least 1, got {list(self.widths)}")

    @property
    def multiple(self) -> int:
        return int(2 ** len(self.widths))

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return channels_last(Fcn(plane(self, input_shape), self.widths, outputs))
