# SPDX-License-Identifier: Apache-2.0
"""Networks that ``torch.compile`` turns into fewer, larger operations, where a hospital's process asks for it."""

import logging
import os
from typing import Any

from torch import nn

from medpfl.core.errors import ConfigError

WANTED = "MEDPFL_COMPILE"
"""Environment variable: ``1`` compiles networks when they are first used; results may differ in their last digits."""


def wanted() -> bool:
    """Whether the environment asks for it.

    Raises:
        ConfigError: it holds something else than 0 or 1.
    """
    asked = os.environ.get(WANTED, "0")
    if asked not in ("0", "1"):
        raise ConfigError(f"{WANTED} must be 0 or 1, got '{asked}'")
    return asked == "1"


def compile_in_place(network: nn.Module, name: str) -> None:
    """Compile a network at its first call. Its entries keep their names, and copies of it are not compiled.

    Where torch cannot compile it, a warning says so with torch's reason, and it computes as it always did from then on.
    So does a pass in which a method watches a layer: torch does not look whether one is watched since it compiled.
    """
    if type(network).__module__.startswith("torch.nn."):
        _tell(name, "torch does not compile its own containers")  # it would not say so
        return
    network.compile()
    run, own = network._compiled_call_impl, _hooks(network)
    assert run is not None

    def attempt(*args: Any, **named: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        if _hooks(network) != own:
            return network._call_impl(*args, **named)  # type: ignore[no-untyped-call]
        try:
            return run(*args, **named)
        except TorchDynamoException as error:
            network._compiled_call_impl = None
            _tell(name, str(error).strip().partition("\n")[0])
            return network(*args, **named)

    network._compiled_call_impl = attempt


def _hooks(network: nn.Module) -> int:
    """How many are called beside its layers in a pass."""
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in network.modules())


def _tell(name: str, reason: str) -> None:
    logging.getLogger(__name__).warning(
        "%s=1: torch cannot compile the network '%s' here, which trains without (%s)", WANTED, name, reason
    )
