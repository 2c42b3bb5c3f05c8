# SPDX-License-Identifier: Apache-2.0
"""What a hospital tells of its features: mean and variance of each channel, layer by layer. All of it leaves the
hospital, and nothing else of FedAP's does but the mixed slot (docs/methods/fedap.md).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from medpfl.core.copied import copied
from medpfl.core.errors import ConfigError
from medpfl.core.groups import BATCH_NORM, head_of, name_of
from medpfl.core.moments import InputMoments
from medpfl.core.tied import load_own_state
from medpfl.methods.contract import Site
from medpfl.methods.features import DEFINE, check_head


def batch_norm_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Path to module."""
    return {path: module for path, module in network.named_modules() if isinstance(module, BATCH_NORM)}


def input_statistics(name: str, network: nn.Module, site: Site) -> dict[str, Tensor]:
    """Moments of what enters layers over the training part.

    Args:
        name: "batch_norm_inputs" or "head_inputs", which layers.

    Returns:
        Layer's path with ".mean" and ".variance" to a float64 tensor of its channels.

    Raises:
        ConfigError: the network has no such layer.
    """
    if name == "head_inputs":
        check_head(site, network, None, DEFINE)
    head = head_of(network)
    layers = batch_norm_layers(network) if name == "batch_norm_inputs" else {head: network.get_submodule(head)}
    if not layers:
        raise ConfigError(
            f"FedAP compares the inputs of BatchNorm layers, and the network {name_of(network)} has none: set the "
            "server component's statistics to 'head_inputs' (d-FedAP)"
        )
    with InputMoments(layers) as watched, torch.no_grad():
        for inputs in site.training_inputs():
            network(inputs)
    return watched.result()


def observed(network: nn.Module, pretrained: str | None, checkpoints: Mapping[str, Mapping[str, Tensor]]) -> nn.Module:
    """A copy of the network for ``input_statistics``: the same one at every hospital, in evaluation mode.

    Args:
        pretrained: name among the ``checkpoints`` of its weights; None: as it is.

    Raises:
        ConfigError: the checkpoint does not fit the network.
    """
    network = copied(network).eval()
    if pretrained is not None:
        try:
            load_own_state(network, checkpoints[pretrained])
        except RuntimeError as error:
            problem = " ".join(str(error).split())
            raise ConfigError(f"checkpoint '{pretrained}' does not fit the job's network: {problem}") from error
    return network


def running_moments(network: nn.Module) -> dict[str, Tensor]:
    """BatchNorm's own running statistics, as ``input_statistics`` returns its: f-FedAP's.

    Raises:
        ConfigError: a layer keeps none, or there is no such layer.
    """
    found: dict[str, Tensor] = {}
    for path, module in batch_norm_layers(network).items():
        mean, variance = module.running_mean, module.running_var
        if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
            raise ConfigError(f"BatchNorm layer '{path}' keeps no running statistics, which f-FedAP compares")
        found[f"{path}.mean"], found[f"{path}.variance"] = mean.double(), variance.double()
    if not found:
        raise ConfigError(
            f"f-FedAP compares BatchNorm's running statistics, and the network {name_of(network)} has none"
        )
    return found
