# SPDX-License-Identifier: Apache-2.0
"""What a network's head sees, its representation of the inputs; and whether the head takes part at all."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import head_of, name_of
from medpfl.core.moments import entering


def not_run(network: nn.Module, head: str | Sequence[str], instead: str) -> ConfigError:
    """The sentence on a head through which nothing goes, so that the method would do something else than it says.

    Args:
        instead: what to do.
    """
    paths = " and ".join(map(repr, [head] if isinstance(head, str) else head))
    return ConfigError(
        f"the head of the network {name_of(network)} is taken to be {paths}, which does not run when it predicts: "
        f"{instead}"
    )


def check_head_trained(network: nn.Module, head: str | Sequence[str] | None) -> None:
    """After training steps of the whole network.

    Raises:
        ConfigError: they reached the network and not its ``head`` (None: ``head_of``).
    """
    head = head or head_of(network)
    inside = tuple(f"{path}." for path in ([head] if isinstance(head, str) else head))
    trained = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    heads = [weight for name, weight in trained if name.startswith(inside)]
    if heads and all(weight.grad is None for weight in heads) and any(one.grad is not None for _, one in trained):
        raise not_run(network, head, "name another one in the method's 'head'")


def with_features(network: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the input of the head, B x ..., from one forward pass.

    Raises:
        ConfigError: the network has no head, or does not run it.
    """
    seen: list[Tensor] = []
    head = head_of(network)

    def keep(_: nn.Module, args: Any, named: Any) -> None:
        seen.append(entering(args, named))

    handle = network.get_submodule(head).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        outputs: Tensor = network(inputs)
    finally:
        handle.remove()
    if not seen:
        raise not_run(network, head, "define the layer that gives its outputs last, and run it as a module")
    return outputs, seen[0]
