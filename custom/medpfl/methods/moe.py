# SPDX-License-Identifier: Apache-2.0
"""MoE: the common model's and the hospital's own prediction, mixed by a gate that sees the input.

Peterson, Kanani, Marathe, "Private Federated Learning with Domain Adaptation", arXiv:1912.06733, 2019, as the CusFL
paper states it (its Eq. 1):  y(x) = alpha(x) y_G(x) + (1 - alpha(x)) y_P(x),  alpha(x) = sigmoid(w x + b), y class
probabilities. G is trained as in FedAvg and P alone; the gate learns on the mixture of both, which stand still for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.data.resident import part_of
from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.methods.as_in_training import as_in_training
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.divergence import largest
from medpfl.models.outputs import check_outputs
from medpfl.privacy.contract import Cover


def mixture(gate: Tensor, common: Tensor, own: Tensor) -> Tensor:
    """Logits of  alpha p_G + (1 - alpha) p_P,  alpha = sigmoid(gate).

    Args:
        gate: B x 1.
        common, own: logits, B x C x ...; one output stands for the pair (0, output).
    """
    gate, common, own = (tensor.float() for tensor in (gate, common, own))
    gate = gate.reshape(-1, *(1 for _ in common.shape[1:]))

    def log_mixed(g: Tensor, p: Tensor) -> Tensor:
        log = nn.functional.logsigmoid
        return torch.logaddexp(log(gate) + g, log(-gate) + p)

    if common.shape[1] == 1:
        log = nn.functional.logsigmoid
        return log_mixed(log(common), log(own)) - log_mixed(log(-common), log(-own))
    return log_mixed(common.log_softmax(dim=1), own.log_softmax(dim=1))


class Gate(nn.Sequential):
    """Linear in the values of an input; of a slice of another size than in training it sees what training would."""

    def __init__(self, shape: Sequence[int]):
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), 1))
        self._shape = tuple(shape)

    def forward(self, inputs: Tensor) -> Tensor:
        if tuple(inputs.shape[1:]) != self._shape:
            inputs = as_in_training(inputs, self._shape)
        found: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True, kw_only=True)
class MoE(Method):
    """Slot "global" (mean). Private: "expert", and "gate", linear in the input's values and 1/2 everywhere at first."""

    deploys: ClassVar = {"personal": "gate", "global": "global"}
    cover: ClassVar = Cover(at_home=("expert", "gate"))
    diagnoses: ClassVar = ("gate",)

    def models(self, build: Build) -> dict[str, nn.Module]:
        build.only_for("MoE", Target.CLASS, Target.MASK)
        gate = Gate(build.input_shape)
        for weight in gate.parameters():
            nn.init.zeros_(weight)
        return {"global": build.network(), "expert": build.network(), "gate": gate}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"global": under(models, "global")}

    def components(self) -> dict[str, Mixer]:
        return {"global": Mean()}

    def local_round(self, site: Site) -> None:
        site.models.train()
        for batch in site.training_batches():
            found = {}
            for name in ("global", "expert"):
                with site.autocast():
                    outputs = site.models[name](batch.inputs)
                    found[name] = largest(outputs)
                    loss = site.task.loss(outputs, batch.targets)
                site.step(name, loss)
            with site.autocast():
                gate = site.models["gate"](batch.inputs)
            mixed = mixture(gate, found["global"].detach(), found["expert"].detach())
            site.step("gate", site.task.loss(mixed, batch.targets))  # the mixture's loss is the one that is reported

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        common: Tensor = models["global"](inputs)
        if name == "global":
            return common
        own: Tensor = models["expert"](inputs)
        check_outputs(own)
        return mixture(models["gate"](inputs), common, own)

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """Mean alpha, the common model's share."""
        with torch.no_grad():
            shares = [
                models["gate"](part_of(samples.inputs, slice(start, start + 256), device)).sigmoid().flatten()
                for start in range(0, len(samples), 256)
            ]
        return {"gate": float(torch.cat(shares).cpu().double().mean())}
