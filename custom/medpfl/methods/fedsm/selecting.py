# SPDX-License-Identifier: Apache-2.0
"""Training of FedSM's selector at a hospital: gradients over kept signatures, and Adam whose moments travel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medpfl.core.adam import adam_step
from medpfl.core.devices import moved
from medpfl.methods.contract import Site
from medpfl.models.selector import Selector, with_content

_CHUNK = 64


@dataclass(frozen=True)
class Seen:
    """What the selector is trained on here: the ``signatures`` (n x ..., on the device) of training samples, and their
    ``places`` in the split."""

    signatures: Tensor
    places: Tensor


Loss = Callable[[Tensor, Tensor], Tensor]
"""Summed loss of logits (b x K) of kept samples with these numbers (b, from 0)."""


def seen(site: Site, most: int) -> Seen:
    """The signatures of at most ``most`` training samples with content: read once, then kept in memory."""

    def read() -> Seen:
        selector, samples = selector_of(site.models), site.data.splits["train"]
        chosen = site.chosen("selector", most)
        signatures, places = [], []
        with torch.no_grad():
            for part in torch.split(chosen, samples.together(_CHUNK)):
                inputs = samples.inputs[part]
                content = with_content(inputs)
                signatures.append(selector.signature(moved(inputs[content], site.device)))
                places.append(part[content])
        return Seen(torch.cat(signatures), torch.cat(places))

    return site.keep("selector", read)


def selector_of(models: nn.ModuleDict) -> Selector:
    selector = models["selector"]
    assert isinstance(selector, Selector)
    return selector


def gradient(site: Site, data: Seen, loss: Loss, counted: Tensor | None = None) -> dict[str, Tensor]:
    """Mean gradient of ``loss`` over the kept samples, by parameter of the selector; zero where there are none.

    Args:
        counted: how much each sample counts in the loss; None: all alike.
    """
    if len(data.places):  # a job may keep a single one, whose signature its gradient then tells
        site.learnt_from("selector", data.places, counted)
    selector = selector_of(site.models)
    selector.train()
    weights = dict(selector.named_parameters())
    total = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    for numbers in torch.split(torch.arange(len(data.places)), _CHUNK):
        if not len(numbers):
            break
        value = loss(selector.decide(data.signatures[moved(numbers, site.device)]), numbers)
        for key, part in zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True):
            total[key] += part / len(data.places)
    return total


class Moments(nn.Module):
    """Adam's state for a network as buffers, so that it can travel in the network's slot and be averaged with it."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        for key, weight in network.named_parameters():
            for kind in ("mean", "square"):
                self.register_buffer(self._name(kind, key), torch.zeros_like(weight))

    @staticmethod
    def _name(kind: str, key: str) -> str:
        return f"{kind}_{key.replace('.', '_')}"

    def advance(self, network: nn.Module, gradients: dict[str, Tensor], lr: float) -> None:
        """One step of Adam (betas 0.9 and 0.999)."""
        step = self.get_buffer("step")
        step += 1
        with torch.no_grad():
            for key, weight in network.named_parameters():
                mean, square = (self.get_buffer(self._name(kind, key)) for kind in ("mean", "square"))
                adam_step(weight, gradients[key], mean, square, float(step), lr)
