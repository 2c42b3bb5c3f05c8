# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg: a common model from which one local gradient step leads to a good personal one.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, Algorithm 1, in its first-order (FO) and Hessian-free (HF) forms. With batches D, D', D'' and
v = w - inner_lr grad f(w, D),  the model is moved down  grad f(v, D')  (FO), or in HF down
grad f(v, D') - inner_lr [grad f(w + delta g, D'') - grad f(w - delta g, D'')] / (2 delta),  g = grad f(v, D').
Every batch of the round is D' once; the next two (the last go on with the first) are D and D''. Running statistics of
BatchNorm follow the pass at v on D'. Deployed is the model after one step on the whole local training data.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.core.tied import call_with, load_own_state, own_state
from medpfl.methods.contract import Batch, Build, Method, Site
from medpfl.privacy.contract import Cover

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Method):
    """Slot "model" (mean): the common network. Private: what one step makes of it, which predicts.

    Args:
        lr: of the steps of the common network, with the method's optimiser.
        inner_lr: size of the adapting step (plain gradient descent), >= 0. 0 is FedAvg.
        variant: "first-order" or "hessian-free".
        delta: of the Hessian-free difference, > 0.
    """

    inner_lr: float = 0.01
    variant: Literal["first-order", "hessian-free"] = "first-order"
    delta: float = 1e-3

    deploys: ClassVar = {"personal": "personal"}
    cover: ClassVar = Cover(record="its gradients are of several batches at once, not of one case")
    after_steps: ClassVar = ("personal",)

    excludes: ClassVar = {"fp16": "it makes gradients of its own, whose small values fp16 would lose; take bf16"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner_lr < 0:
            raise ConfigError(f"PerFedAvg's inner_lr must be at least 0, got {self.inner_lr}")
        if self.delta <= 0:
            raise ConfigError(f"PerFedAvg's delta must be above 0, got {self.delta}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network(), "personal": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": under(models, "model")}

    def components(self) -> dict[str, Mixer]:
        return {"model": Mean()}

    def local_round(self, site: Site) -> None:
        site.models["model"].train()
        weights = _trained(site.models["model"])
        for batch, next_, after in _threes(site.training_batches()):
            first, _ = _gradient(site, weights, next_)
            gradient, loss = _gradient(site, _moved(weights, first, -self.inner_lr), batch, follow=True)
            through = [next_]
            if self.variant == "hessian-free":
                through.append(after)
                gradient = _moved(gradient, self._curvature(site, weights, gradient, after), -self.inner_lr)
            site.turn_to(batch)
            site.descend("model", gradient, loss, through)

    def _curvature(self, site: Site, weights: Weights, along: Weights, batch: Batch) -> Weights:
        """[grad f(w + delta g, D'') - grad f(w - delta g, D'')] / (2 delta), g = ``along``.

        Whatever else differs between the two is divided by 2 delta, too, and would be hundreds of times what is wanted:
        so both draw the same dropout, and neither is rounded to half precision.
        """
        with torch.random.fork_rng(devices=[site.device] if site.device.type == "cuda" else []):
            ahead, _ = _gradient(site, _moved(weights, along, self.delta), batch, half=False)
        behind, _ = _gradient(site, _moved(weights, along, -self.delta), batch, half=False)
        return {key: (ahead[key] - behind[key]) / (2 * self.delta) for key in weights}

    def after_mixing(self, site: Site) -> None:
        site.models["model"].train()
        weights = _trained(site.models["model"])
        total, seen = {key: torch.zeros_like(weight) for key, weight in weights.items()}, 0
        for batch in site.training_batches(epochs=1):
            gradient, _ = _gradient(site, weights, batch)
            total = _moved(total, gradient, len(batch.inputs))
            seen += len(batch.inputs)
        adapted = _moved(weights, total, -self.inner_lr / seen)
        load_own_state(site.models["personal"], {**own_state(site.models["model"]), **adapted})


def _trained(network: nn.Module) -> Weights:
    """The weights that training moves; the network may hold others fixed."""
    return {key: weight.detach() for key, weight in network.named_parameters() if weight.requires_grad}


def _moved(weights: Weights, direction: Weights, length: float) -> Weights:
    return {key: weight + length * direction[key] for key, weight in weights.items()}


def _gradient(
    site: Site, weights: Weights, batch: Batch, follow: bool = False, half: bool = True
) -> tuple[Weights, Tensor]:
    """Gradient and value of the loss at ``weights``; BatchNorm's statistics move only if they shall ``follow``, and
    only with ``half`` is the method's ``precision`` followed."""
    network = site.models["model"]
    at = {key: weight.detach().requires_grad_() for key, weight in weights.items()}
    buffers = {} if follow else {key: buffer.clone() for key, buffer in network.named_buffers()}
    with site.autocast() if half else nullcontext():
        loss = site.task.loss(call_with(network, {**at, **buffers}, batch.inputs), batch.targets)
    found = torch.autograd.grad(loss, list(at.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(at, found, strict=True)), loss.detach()


def _threes(batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch, Batch]]:
    """Every batch with the two that follow it, round the corner."""
    first = list(islice(batches, 2))
    around = (first * 2)[:2]
    stream = chain(first, batches, around)
    window: deque[Batch] = deque(islice(stream, 2), maxlen=3)
    for batch in stream:
        window.append(batch)
        yield window[0], window[1], window[2]
