# SPDX-License-Identifier: Apache-2.0
"""MONAI's classifiers by name, with numbers as options: no path, no download, no code."""

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from medpfl.core.errors import ConfigError, meant
from medpfl.models.contract import Architecture
from medpfl.models.memory_order import channels_last
from medpfl.models.norms import Norm, shapes_alone, with_norm

_DENSE = ("init_features", "growth_rate", "block_config", "bn_size", "dropout_prob")
_RESIDUAL = ("conv1_t_size", "conv1_t_stride", "no_max_pool", "widen_factor")
_SQUEEZE = ("layers", "groups", "reduction", "dropout_prob", "inplanes")
_OPTIONS = {"DenseNet": _DENSE, "ResNet": _RESIDUAL, "SEResNet": _SQUEEZE, "SEResNext": _SQUEEZE, "EfficientNet": ()}

Name = Literal[
    "DenseNet121", "DenseNet169", "DenseNet201", "DenseNet264",
    "ResNet10", "ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152",
    "SEResNet50", "SEResNet101", "SEResNet152", "SEResNext50", "SEResNext101",
    "EfficientNetB0", "EfficientNetB1", "EfficientNetB2", "EfficientNetB3", "EfficientNetB4",
]  # fmt: skip


@dataclass(frozen=True)
class MonaiNet(Architecture):
    """A network of ``monai.networks.nets``, without pretrained weights.

    Args:
        network: its name.
        options: numbers for its constructor, such as {"growth_rate": 6, "block_config": [16, 16, 16]}. DenseNet:
            init_features, growth_rate, block_config, bn_size, dropout_prob. ResNet: conv1_t_size, conv1_t_stride,
            no_max_pool, widen_factor. SEResNet and SEResNext: layers, groups, reduction, dropout_prob, inplanes.
            EfficientNet: none.
        norm: kind of normalisation.
    """

    network: Name
    options: dict[str, bool | int | float | list[int]] = field(default_factory=dict)
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        family = self.network.rstrip("0123456789")
        known = _OPTIONS["EfficientNet" if family.startswith("EfficientNet") else family]
        for option in self.options:
            if option not in known:
                raise ConfigError(
                    f"MonaiNet: {self.network} has no option '{option}' here; it has: "
                    f"{', '.join(known) or 'none'}{meant(option, known)}"
                )

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs C x H x W or C x D x H x W; of DenseNet every length is at least 29, of EfficientNet 32."""
        if len(input_shape) not in (3, 4):
            raise ConfigError(f"{self.network} needs inputs C x H x W or C x D x H x W, got the shape {input_shape}")
        try:
            network = self._made(len(input_shape) - 1, input_shape[0], outputs)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise ConfigError(f"MonaiNet: {self.network} with the options {self.options}: {error}") from error
        try:
            shapes_alone(network, input_shape)
        except RuntimeError as error:
            raise ConfigError(
                f"MonaiNet: {self.network} needs larger inputs than those of shape {input_shape}: {error}"
            ) from error
        return channels_last(with_norm(network, self.norm, input_shape))

    def _made(self, axes: int, channels: int, outputs: int) -> nn.Module:
        from monai.networks import nets

        if self.network.startswith("DenseNet"):
            network = getattr(nets, self.network)(axes, channels, outputs, **self.options)
        elif self.network.startswith("ResNet"):
            shape = {"spatial_dims": axes, "n_input_channels": channels, "num_classes": outputs}
            network = getattr(nets, self.network.lower())(**shape, **self.options)
        elif self.network.startswith("SE"):
            shape = {"spatial_dims": axes, "in_channels": channels, "num_classes": outputs}
            network = getattr(nets, self.network)(**shape, **self.options)
        else:
            version = f"efficientnet-b{self.network[-1]}"
            network = nets.EfficientNetBN(version, False, False, axes, channels, outputs)
        assert isinstance(network, nn.Module)
        return network
