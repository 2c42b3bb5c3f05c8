# SPDX-License-Identifier: Apache-2.0
"""The optimisers that a job may name, each torch's own.

Fused: one pass over each tensor instead of ten, a sixth of the time on networks of many small ones.
"""

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError

_SMALL = 1e-6
"""An eps of Adam up to which gradients are larger."""


class _Eager(torch.optim.Optimizer):
    """What torch's optimisers do, without the part by which each is kept out of what torch's compiler compiles. That
    part loads the compiler (``torch._dynamo``) into every process that trains: a second or two and 80 MB. What
    ``MEDPFL_COMPILE`` compiles are networks, never an optimiser's step."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class _EagerAdam(_Eager, torch.optim.Adam):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class _EagerAdamW(_Eager, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class _EagerSgd(_Eager, torch.optim.SGD):
    """Its momentum begins at 0, after which torch's step is the same. torch begins with memory as it finds it, which
    the first step fills; float16 may leave that step out. And it fails where some weights have momentum already."""

    _torchs = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"] if group["momentum"] else ():
                if weight.grad is not None and "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        self._torchs()


class _Descent(_Eager, torch.optim.SGD):
    """Nothing but the step itself, w - lr g, whose bits are those of torch's. Around it torch makes lists for its fused
    kernels, and notes for its profiler and for hooks, which takes as long as a small network's gradient."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(weight.grad, alpha=-group["lr"])

    step.hooked = True  # type: ignore[attr-defined] # so that torch's constructor leaves it as it is


@dataclass(frozen=True, kw_only=True)
class Optimizer(Checked):
    """What makes steps of gradients. The learning rate is the method's.

    Args:
        weight_decay: >= 0; of all parameters that are trained, biases and normalisation layers included.
    """

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.weight_decay < 0:
            raise ConfigError(f"{type(self).__name__}'s weight_decay must be at least 0, got {self.weight_decay}")

    @property
    def traits(self) -> frozenset[str]:
        """What a method may exclude of it: "adam", "momentum", "weight_decay"."""
        return frozenset({"weight_decay"} if self.weight_decay else ())

    @abstractmethod
    def takes_back(self, rate: float, pull: float) -> float:
        """What part of a network's change until then a step undoes, about; >= 0, above 1 it overshoots.

        Args:
            rate: the step's learning rate.
            pull: back to where the network started, a factor of the distance that is added to the gradient.
        """

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """torch's optimiser of these parameters."""


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, ICLR 2015); its weight decay is added to the gradient.

    Args:
        betas: decay of the first and the second moment, each in [0, 1).
        eps: added to the root of the second moment, > 0.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"{type(self).__name__}'s betas must be in [0, 1), got {list(self.betas)}")
        if self.eps <= 0:
            raise ConfigError(f"{type(self).__name__}'s eps must be above 0, got {self.eps}")

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | {"adam"}

    def takes_back(self, rate: float, pull: float) -> float:
        return self._divided(rate * (self.weight_decay + pull))

    def _divided(self, taken: float) -> float:
        """A step is as long as the learning rate, whatever pulls; unless eps, and not the gradient, is what it is
        divided by."""
        return taken / self.eps if self.eps > _SMALL else 0.0

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return _EagerAdam(parameters, lr=lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam whose weight decay shrinks the weights by lr weight_decay of their size, apart from the gradient
    (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019)."""

    weight_decay: float = 0.01

    def takes_back(self, rate: float, pull: float) -> float:
        return rate * self.weight_decay + self._divided(rate * pull)

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return _EagerAdamW(
            parameters, lr=lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True
        )


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent; its weight decay is added to the gradient. nnU-Net's (Isensee et al., Nature Methods
    2021) has momentum 0.99, nesterov and weight_decay 3e-5.

    Args:
        momentum: in [0, 1).
        nesterov: Nesterov's momentum; it needs a momentum above 0.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"Sgd's momentum must be in [0, 1), got {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ConfigError("Sgd's nesterov needs a momentum above 0")

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | ({"momentum"} if self.momentum else set())

    def takes_back(self, rate: float, pull: float) -> float:
        return rate * (self.weight_decay + pull) / (1 - self.momentum)

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        moved = list(parameters)
        plain = not self.momentum and not self.weight_decay
        if plain and all(one.device.type == "cpu" for one in moved):
            return _Descent(moved, lr=lr)
        return _EagerSgd(
            moved,
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=True,
        )


OPTIMIZERS: Mapping[str, Optimizer] = {"adam": Adam(), "sgd": Sgd()}
"""The short names."""
