# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: local steps corrected by control variates, so that hospitals do not drift apart.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1 with
option II and a global step size of 1.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from medpfl.core.groups import under
from medpfl.core.mixers import ControlVariates, Mean, Mixer
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.optimizers import Optimizer
from medpfl.methods.proximal import add_gradient
from medpfl.privacy.contract import Cover

_NOTHING = 1e-9
"""A round's steps that are fewer, counted by what the schedule makes of the learning rate, move nothing."""


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Slots: "model" (mean) and "control" (``ControlVariates``: the hospital's own c_i up, the common c down).

    Control variates correct parameters; buffers such as BatchNorm's statistics are averaged with the model.
    """

    optimizer: Literal["adam", "sgd"] | Optimizer = "sgd"

    deploys: ClassVar = {"scaffold": "model"}
    cover: ClassVar = Cover(derived=("control",))
    excludes: ClassVar = dict.fromkeys(
        ("adam", "momentum", "clip_gradient"),
        "its control variates are mean gradients only if every step is lr times a gradient, as plain 'sgd' makes it",
    ) | {"fp16": "its control variates would count the steps that fp16 leaves out"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        network = build.network()

        def zeros() -> nn.ParameterList:
            made = [nn.Parameter(torch.zeros_like(weight), requires_grad=False) for weight in network.parameters()]
            return nn.ParameterList(made)

        return {"model": network, "control": zeros(), "own": zeros()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {name: under(models, name) for name in ("model", "control")}

    def components(self) -> dict[str, Mixer]:
        return {"model": Mean(), "control": ControlVariates()}

    @property
    def anew(self) -> tuple[str, ...]:
        return ("control",)

    def local_round(self, site: Site) -> None:
        network = site.models["model"].train()
        own, common = (list(site.models[name].parameters()) for name in ("own", "control"))
        # What the network holds fixed, which may be no numbers, keeps the zeros with which it began.
        every = list(network.parameters())
        trained = [index for index, weight in enumerate(every) if weight.requires_grad]
        weights = [every[index] for index in trained]
        start = [weight.detach().clone() for weight in weights]
        shift = [common[index] - own[index] for index in trained]
        passed = 0.0  # steps, each counted by what the schedule makes of the learning rate
        for batch in site.training_batches():
            with site.autocast():
                loss = site.task.loss(network(batch.inputs), batch.targets)
            if site.step("model", loss, term=partial(add_gradient, weights, shift)):  # g_i(y_i) - c_i + c
                passed += site.factor
        if passed > _NOTHING:  # else nothing was learnt of the gradients
            with torch.no_grad():
                for index, d, x, y in zip(trained, shift, start, weights, strict=True):
                    own[index].copy_((x - y) / (passed * self.lr) - d)  # option II: c_i - c + (x - y_i) / (K lr)
        site.outbox["control"] = {f"control.{index}": c_i for index, c_i in enumerate(own)}
