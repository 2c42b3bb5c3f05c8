# SPDX-License-Identifier: Apache-2.0
"""The number format of forward passes, and float16's gradients, which are scaled so that small ones are not lost."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from medpfl.core.devices import current
from medpfl.core.errors import ConfigError
from medpfl.methods.training import Training

Scalers = dict[str, torch.amp.GradScaler]
"""By the network that a step is named by: how far its loss is scaled up now."""


def half_of(method: Training, device: torch.device) -> torch.dtype | None:
    """The format of forward passes; None: float32.

    Raises:
        ConfigError: the method asks for bfloat16, and this GPU has none.
    """
    if method.precision == "fp16":
        return torch.float16
    with current(device):
        supported = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if method.precision == "bf16" and not supported:
        raise ConfigError(
            f"{type(method).__name__}'s precision is 'bf16', which this hospital's GPU does not have: take 'auto', or "
            "'fp16'"
        )
    wanted = method.precision == "bf16" or (method.precision == "auto" and device.type == "cuda" and supported)
    return torch.bfloat16 if wanted else None


def cast(half: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Mixed precision with this format."""
    return torch.autocast(device.type, dtype=half) if half else nullcontext()


def unscale(scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Divide the gradients by the scale; before anything is added to them, or they are shortened. Where one of these
    networks has a gradient that is too large, none of them will make the step, which is down a loss of all of them."""
    stepping = with_gradients(optimizers)
    for optimizer in stepping:
        scaler.unscale_(optimizer)
    found = [each for optimizer in stepping for each in scaler._found_inf_per_device(optimizer).values()]
    if len(found) > 1:
        worst = torch.stack(found).amax(dim=0)
        for each in found:
            each.copy_(worst)


def left_out(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """After ``unscale``: a scalar on the device, not 0 where this optimiser's step will be left out. None: it will not
    be for its gradients' sake."""
    if scaler is None:
        return None
    found = list(scaler._found_inf_per_device(optimizer).values())
    return found[0].clone() if found else None  # ``update`` writes into it


def step_scaled(scaler: torch.amp.GradScaler, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The optimisers' steps, none where a gradient is too large for float16; then the scale of the next step. torch's
    fused optimisers look at the gradients on the GPU, so the processor does not wait."""
    for optimizer in with_gradients(optimizers):
        scaler.step(optimizer)
    scaler.update()


def with_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Those with a gradient to step down; the scaler takes no others."""
    return [each for each in optimizers if any(weight.grad is not None for weight in parameters(each))]


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that it moves."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def states_of(scalers: Mapping[str, torch.amp.GradScaler]) -> dict[str, tuple[float, int]]:
    """By network the scale, and for how many steps it has held."""
    states = {name: scaler.state_dict() for name, scaler in scalers.items()}
    return {name: (state["scale"], state["_growth_tracker"]) for name, state in states.items()}


def kept_of(scalers: Mapping[str, torch.amp.GradScaler]) -> dict[str, Tensor]:
    """The same as a hospital keeps it on disk."""
    return {name: torch.tensor(state, dtype=torch.float64) for name, state in states_of(scalers).items()}


def restored(kept: Mapping[str, Tensor], device: torch.device) -> Scalers:
    """The scalers of which ``kept_of`` told."""
    found = {}
    for name, state in kept.items():
        scale, steps = state.tolist()
        scaler = torch.amp.GradScaler(device.type)
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": int(steps)})
        found[name] = scaler
    return found
