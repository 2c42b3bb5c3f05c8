# SPDX-License-Identifier: Apache-2.0
"""What a network's head sees: its representation of the inputs."""

from typing import Any

from torch import Tensor, nn

from medpfl.core.groups import head_of


def with_features(network: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the input of the head, B x ..., from one forward pass.

    Raises:
        ConfigError: the network has no head.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, args: Any) -> None:
        seen.append(args[0])

    handle = network.get_submodule(head_of(network)).register_forward_pre_hook(keep)
    try:
        outputs: Tensor = network(inputs)
    finally:
        handle.remove()
    return outputs, seen[0]
