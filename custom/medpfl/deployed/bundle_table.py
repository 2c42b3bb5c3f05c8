# SPDX-License-Identifier: Apache-2.0
"""Which of MONAI's networks a bundle may name, and what they are called here. Nothing else is built from a bundle."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from medpfl.core.errors import ConfigError, meant
from medpfl.models.contract import Architecture
from medpfl.models.dynunet import DynUNet
from medpfl.models.monai_net import MonaiNet
from medpfl.models.segresnet import SegResNet, VNet
from medpfl.models.transformers import UNETR, SwinUNETR
from medpfl.models.unet import AttentionUnet, UNet, UNetPlusPlus

Arguments = Mapping[str, JsonValue]
_MODULES = ("monai.networks.nets", "")
_SWITCHES: dict[str, JsonValue] = {"use_checkpoint": None, "save_attn": None}  # memory and speed, not what is computed


@dataclass(frozen=True)
class Known:
    """A network of MONAI's.

    Attributes:
        kind: the architecture that it is here.
        same: MONAI's argument to ours, which says the same.
        only: arguments that must have this value if they are given at all; None: any value, for it changes nothing.
        norm: MONAI's argument that names the normalisation, and what it is where the bundle does not say.
        inside: what of the state's names our module puts before MONAI's.
        given: our arguments, where the bundle does not say otherwise.
        plain: MONAI's arguments for the number of axes, of input channels and of outputs.
        usual: what these are where the bundle does not say, as far as MONAI has an answer.
    """

    kind: type[Architecture]
    same: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, JsonValue] = field(default_factory=dict)
    norm: tuple[str, str] | None = None
    inside: str = ""
    given: Arguments = field(default_factory=dict)
    plain: tuple[str, str, str] = ("spatial_dims", "in_channels", "out_channels")
    usual: Arguments = field(default_factory=dict)


def _own(*names: str, **renamed: str) -> dict[str, str]:
    return {**{name: name for name in names}, **renamed}


_VOLUMES: Arguments = {"spatial_dims": 3}
_LEAKY: JsonValue = ["leakyrelu", {"inplace": True, "negative_slope": 0.01}]
TABLE: dict[str, Known] = {
    "UNet": Known(
        UNet,
        _own("channels", "dropout", num_res_units="residual_units"),
        {"kernel_size": 3, "up_kernel_size": 3, "act": "prelu", "bias": True, "adn_ordering": "NDA", "strides": 2},
        ("norm", "instance"),
    ),
    "AttentionUnet": Known(
        AttentionUnet, _own("channels", "dropout"), {"kernel_size": 3, "up_kernel_size": 3, "strides": 2}
    ),
    "DynUNet": Known(
        DynUNet,
        _own("filters", "strides", "deep_supervision", kernel_size="kernels", res_block="residual"),
        {"trans_bias": False, "act_name": _LEAKY, "deep_supr_num": None, "upsample_kernel_size": None, "dropout": 0},
        ("norm_name", "instance"),
    ),
    "SegResNet": Known(
        SegResNet,
        _own("init_filters", "blocks_down", "blocks_up", dropout_prob="dropout"),
        {"act": "relu", "upsample_mode": "nontrainable", "use_conv_final": True, "num_groups": 8, "norm_name": ""},
        ("norm", "group"),
        usual={**_VOLUMES, "in_channels": 1, "out_channels": 2},
    ),
    "UNETR": Known(
        UNETR,
        _own("feature_size", "hidden_size", "mlp_dim", "num_heads", dropout_rate="dropout"),
        {"img_size": None, "conv_block": True, "res_block": True, "qkv_bias": False, "proj_type": "conv", **_SWITCHES},
        ("norm_name", "instance"),
        usual=_VOLUMES,
    ),
    "SwinUNETR": Known(
        SwinUNETR,
        _own("feature_size", "depths", "num_heads", "window_size", drop_rate="dropout", use_v2="version_2"),
        {
            "img_size": None, "patch_size": 2, "qkv_bias": True, "mlp_ratio": 4, "attn_drop_rate": 0,
            "dropout_path_rate": 0, "normalize": True, "patch_norm": False, "downsample": "merging", "use_hyena": False,
            **_SWITCHES,
        },
        ("norm_name", "instance"),
        usual=_VOLUMES,
    ),
    "VNet": Known(
        VNet,
        {"dropout_prob": "dropout", "dropout_prob_down": "dropout"},
        {"dropout_prob_up": None, "dropout_dim": None, "bias": False, "act": ["elu", {"inplace": True}]},
        usual={**_VOLUMES, "in_channels": 1, "out_channels": 1},
    ),
    "BasicUNetPlusPlus": Known(
        UNetPlusPlus,
        _own("features", "dropout"),
        {"deep_supervision": False, "bias": True, "upsample": "deconv"},
        ("norm", "instance"),
        "network.",
        given={"features": [32, 32, 64, 128, 256, 32]},  # MONAI's, where the bundle does not say
        usual={**_VOLUMES, "in_channels": 1, "out_channels": 2},
    ),
    **{
        name: Known(
            MonaiNet,
            only={"pretrained": False, "progress": None, "act": ["relu", {"inplace": True}], "norm": "batch"},
            given={"network": name},
        )
        for name in ("DenseNet121", "DenseNet169", "DenseNet201", "DenseNet264")
    },
    **{
        name: Known(
            MonaiNet,
            only={"pretrained": False, "progress": None},
            given={"network": name},
            plain=("spatial_dims", "in_channels", "num_classes"),
            usual={"num_classes": 1000},
        )
        for name in ("SEResNet50", "SEResNet101", "SEResNet152")
    },
}  # fmt: skip


def known(target: JsonValue) -> tuple[str, Known]:
    """The network that a bundle's ``_target_`` names.

    Raises:
        ConfigError: it is none of the table's.
    """
    if target == "torch.jit.load":
        raise ConfigError(
            "it is TorchScript, which is a program, and is not read (of a bundle that MedPFL exported: declare the "
            "model's own .safetensors file)"
        )
    module, _, name = target.rpartition(".") if isinstance(target, str) else ("", "", str(target))
    if name not in TABLE or not (module in _MODULES or module.startswith(f"{_MODULES[0]}.")):
        raise ConfigError(
            f"'_target_' must be one of MONAI's networks {', '.join(TABLE)}; got {target!r}, and nothing else is built "
            f"or imported{meant(name, TABLE)}"
        )
    return name, TABLE[name]


def arguments(name: str, found: Known, given: Arguments) -> dict[str, JsonValue]:
    """Our arguments of MONAI's.

    Raises:
        ConfigError: one has no counterpart here.
    """
    ours: dict[str, JsonValue] = dict(found.given)
    argument, default = found.norm or ("", "")
    if argument:
        ours["norm"] = _norm(name, argument, given.get(argument, default))
    for key, value in given.items():
        if key in found.same:
            if value is not None:  # MONAI's word for none: the default
                ours[found.same[key]] = value
        elif key in found.only:
            wanted = found.only[key]
            if wanted is not None and not _equal(value, wanted):
                raise ConfigError(f"{name}'s '{key}' must be {wanted!r} here, got {value!r}")
        elif key not in found.plain and key != argument:
            raise ConfigError(f"{name}'s '{key}' has no counterpart here{meant(key, [*found.same, *found.only])}")
    if name == "DynUNet":
        _of_dynunet(given, ours)
    return ours


def _of_dynunet(given: Arguments, ours: dict[str, JsonValue]) -> None:
    """MONAI writes the first level's stride, which is 1 here, numbers for all axes, and the way up, which mirrors."""
    axes = given.get("spatial_dims")
    axes = axes if isinstance(axes, int) else 3
    strides, kernels, upwards = (
        _levels(given, key, axes) for key in ("strides", "kernel_size", "upsample_kernel_size")
    )
    if strides[:1] != [[1] * axes] or upwards != strides[1:]:
        raise ConfigError(
            "DynUNet's 'strides' must begin with 1, and 'upsample_kernel_size' must be the others; got "
            f"{given.get('strides')!r} and {given.get('upsample_kernel_size')!r}"
        )
    ours["strides"], ours["kernels"] = [*strides[1:]], [*kernels]
    if "filters" not in ours:  # MONAI's rule
        ours["filters"] = [min(2 ** (5 + level), 320 if axes == 3 else 512) for level in range(len(strides))]


def _levels(given: Arguments, key: str, axes: int) -> list[JsonValue]:
    levels = given.get(key)
    if not isinstance(levels, list):
        raise ConfigError(f"DynUNet's '{key}' must be a list, got {levels!r}")
    return [level if isinstance(level, list) else [level for _ in range(axes)] for level in levels]


def _norm(name: str, argument: str, value: JsonValue) -> str:
    kind, options = value if isinstance(value, list) and len(value) == 2 else (value, {})
    found = str(kind).lower()
    extra = {key: one for key, one in options.items() if key != "affine"} if isinstance(options, dict) else options
    if found not in ("batch", "instance", "group") or extra not in ({}, {"num_groups": 8}):
        raise ConfigError(f"{name}'s '{argument}' must be batch, instance, or group with 8 groups here, got {value!r}")
    return found


def _equal(value: JsonValue, wanted: JsonValue) -> bool:
    """The same, whatever the letters' case; a list of equal numbers is that number, and a name alone has defaults."""
    if isinstance(value, list) and value and not isinstance(wanted, list):
        return all(_equal(one, wanted) for one in value)
    if isinstance(wanted, list) and isinstance(value, str):
        wanted = wanted[0]
    if isinstance(value, str) and isinstance(wanted, str):
        return value.lower() == wanted.lower()
    return value == wanted or (value is None and wanted == 0)
