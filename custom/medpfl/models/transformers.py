# SPDX-License-Identifier: Apache-2.0
"""Networks of transformers: UNETR and Swin UNETR for segmentation, ViT for classification, in 2-D or 3-D."""

from dataclasses import dataclass

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.norms import Norm, with_norm
from medpfl.models.options import axes_of, divides, share, whole
from medpfl.models.unet import First

_LAYERS = 200
"""Most layers of a transformer."""
_INDEXED = 2**25
"""Most entries of the tables that say how the positions of a window lie to each other."""


@dataclass(frozen=True)
class UNETR(Architecture):
    """MONAI's UNETR (Hatamizadeh et al., WACV 2022): twelve transformer layers over patches of 16 voxels an axis, and a
    way up of convolutions.

    Args:
        feature_size: channels of the top level.
        hidden_size: width of the transformer, a multiple of ``num_heads``.
        mlp_dim: width inside its layers.
        num_heads: heads of the attention.
        norm: kind of normalisation of the convolutions; the transformer has layer norm.
        dropout: share that the transformer leaves out in training, in [0, 1).
    """

    feature_size: int = 16
    hidden_size: int = 768
    mlp_dim: int = 3072
    num_heads: int = 12
    norm: Norm = "instance"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        whole(self, "feature_size", "hidden_size", "mlp_dim", "num_heads")
        divides(self, "num_heads", "hidden_size")
        share(self)

    @property
    def multiple(self) -> int:
        return 16

    @property
    def fixed(self) -> bool:
        return True

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import UNETR as Network

        network = Network(
            input_shape[0],
            outputs,
            img_size=input_shape[1:],
            feature_size=self.feature_size,
            hidden_size=self.hidden_size,
            mlp_dim=self.mlp_dim,
            num_heads=self.num_heads,
            norm_name="batch",
            dropout_rate=self.dropout,
            spatial_dims=axes_of(self, input_shape),
        )
        return with_norm(_used(network), self.norm, input_shape)


@dataclass(frozen=True)
class SwinUNETR(Architecture):
    """MONAI's Swin UNETR (Hatamizadeh et al., BrainLes 2021): four stages of attention within shifted windows, and a
    way up of convolutions.

    Args:
        feature_size: channels of the top level, a multiple of 12.
        depths: layers of each of the four stages.
        num_heads: heads of the attention in each of the four stages; each divides its stage's channels.
        window_size: length of a window along every axis.
        norm: kind of normalisation of the convolutions; the transformer has layer norm.
        dropout: share that the transformer leaves out in training, in [0, 1).
        version_2: a residual convolution before each stage (He et al., MICCAI 2023).
    """

    feature_size: int = 24
    depths: tuple[int, int, int, int] = (2, 2, 2, 2)
    num_heads: tuple[int, int, int, int] = (3, 6, 12, 24)
    window_size: int = 7
    norm: Norm = "instance"
    dropout: float = 0.0
    version_2: bool = False

    def __post_init__(self) -> None:
        whole(self, "feature_size", "num_heads")
        whole(self, "depths", most=_LAYERS)
        whole(self, "window_size", least=2, most=64)
        share(self)
        if self.feature_size % 12:
            raise ConfigError(f"SwinUNETR's feature_size must be a multiple of 12, got {self.feature_size}")
        for stage, heads in enumerate(self.num_heads):
            if self.feature_size * 2**stage % heads:
                raise ConfigError(
                    f"SwinUNETR's num_heads must divide the {self.feature_size * 2**stage} channels of stage "
                    f"{stage + 1}, got {heads}"
                )

    @property
    def multiple(self) -> int:
        return 32

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import SwinUNETR as Network

        axes = axes_of(self, input_shape)
        indexed = sum(self.depths) * self.window_size ** (2 * axes)
        if indexed > _INDEXED:
            raise ConfigError(
                f"SwinUNETR's windows of {' x '.join([str(self.window_size)] * axes)} in {sum(self.depths)} layers "
                f"need tables of {indexed} entries, and may have {_INDEXED}"
            )
        network = Network(
            input_shape[0],
            outputs,
            depths=self.depths,
            num_heads=self.num_heads,
            window_size=self.window_size,
            feature_size=self.feature_size,
            norm_name="batch",
            drop_rate=self.dropout,
            attn_drop_rate=self.dropout,
            spatial_dims=axes,
            use_v2=self.version_2,
        )
        return with_norm(_used(network), self.norm, input_shape)


def _used(network: nn.Module) -> nn.Module:
    """The same network without what would be sent in every round for nothing: weights that MONAI's layers have for an
    attention between two inputs, and tables of how a window's positions lie to each other, which follow from its size.
    """
    for module in list(network.modules()):
        if "norm_cross_attn" in dict(module.named_children()):
            module.register_module("norm_cross_attn", nn.Identity())
        for name, table in list(module.named_buffers(recurse=False)):
            if name == "relative_position_index":
                module.register_buffer(name, table, persistent=False)
    return network


@dataclass(frozen=True)
class ViT(Architecture):
    """MONAI's vision transformer with a class token (Dosovitskiy et al., ICLR 2021). It has layer norm.

    Args:
        patch_size: length of a patch along every axis; the inputs' lengths are multiples of it.
        hidden_size: width of the transformer, a multiple of ``num_heads``.
        mlp_dim: width inside its layers.
        num_layers: number of layers.
        num_heads: heads of the attention.
        dropout: share that is left out in training, in [0, 1).
    """

    patch_size: int = 16
    hidden_size: int = 192
    mlp_dim: int = 768
    num_layers: int = 12
    num_heads: int = 3
    dropout: float = 0.0

    def __post_init__(self) -> None:
        whole(self, "patch_size", "hidden_size", "mlp_dim", "num_heads")
        whole(self, "num_layers", most=_LAYERS)
        divides(self, "num_heads", "hidden_size")
        share(self)

    @property
    def fixed(self) -> bool:
        return True

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import ViT as Network

        axes = axes_of(self, input_shape)
        if any(length % self.patch_size for length in input_shape[1:]):
            raise ConfigError(
                f"ViT takes lengths that are multiples of its patch_size {self.patch_size}, got inputs of shape "
                f"{input_shape}"
            )
        network = Network(
            input_shape[0],
            img_size=input_shape[1:],
            patch_size=self.patch_size,
            hidden_size=self.hidden_size,
            mlp_dim=self.mlp_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            classification=True,
            num_classes=outputs,
            dropout_rate=self.dropout,
            spatial_dims=axes,
            post_activation="none",
        )
        return First(_used(network))
