# SPDX-License-Identifier: Apache-2.0
"""What a network's head sees, its representation of the inputs; and whether the head takes part at all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import head_of, name_of
from medpfl.core.moments import entering
from medpfl.methods.contract import Site
from medpfl.models.outputs import check_outputs

DEFINE = "define the layer that gives its outputs last, and run it as a module"


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


def check_head(site: Site, network: nn.Module, head: str | Sequence[str] | None, instead: str) -> None:
    """Once in a process, and before the network is trained.

    Args:
        head: None: ``head_of``.
        instead: what to do about it.

    Raises:
        ConfigError: nothing of what the network predicts goes through the ``head``, which an auxiliary loss may train.
    """
    site.keep("a head that predicts", lambda: _check_head(site, network, head or head_of(network), instead))


def _check_head(site: Site, network: nn.Module, head: str | Sequence[str], instead: str) -> None:
    inside = tuple(f"{path}." for path in ([head] if isinstance(head, str) else head))
    weights = [one for name, one in network.named_parameters() if name.startswith(inside) and one.requires_grad]
    with torch.random.fork_rng(devices=[site.device] if site.device.type == "cuda" else []):
        outputs = network.eval()(torch.zeros(1, *site.data.input_shape, device=site.device))
    check_outputs(outputs)
    if weights and outputs.requires_grad:  # else it is frozen, or the network predicts without a graph
        reached = torch.autograd.grad(outputs.sum(), weights, allow_unused=True)
        if all(gradient is None for gradient in reached):
            raise not_run(network, head, instead)


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
        raise not_run(network, head, DEFINE)
    return outputs, seen[0]
