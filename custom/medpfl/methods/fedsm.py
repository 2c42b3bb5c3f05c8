# SPDX-License-Identifier: Apache-2.0
"""FedSM's training: a global model, softly pulled personal models, and a selector between them.

Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022, Algorithm 1.
Deviation: a hospital sends its selector's mean gradient and the server takes the Adam step (``ServerAdam``), because
local steps on the single class that a hospital holds collapse. Not yet here: the super model of Algorithm 2.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.mixers import Mixer, ServerAdam, SoftPull
from medpfl.methods.base import Build, Method, Site
from medpfl.models.selector import Selector
from medpfl.sites.samples import Samples


@dataclass(frozen=True, kw_only=True)
class FedSM(Method):
    """Slots: "global" (mean), "personal" (SoftPull), "selector" (ServerAdam: gradients up, weights down)."""

    deploys: ClassVar = {"personal": "personal", "global": "global"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        selector = build.seeded(lambda: Selector(build.input_shape, len(build.roster)))
        return {"global": build.network(), "personal": build.network(), "selector": selector}

    def components(self) -> dict[str, Mixer]:
        return {"personal": SoftPull(), "selector": ServerAdam()}

    def local_round(self, site: Site) -> None:
        site.models.train()
        selector = site.models["selector"]
        weights = dict(selector.named_parameters())
        total = {key: torch.zeros_like(weight) for key, weight in weights.items()}
        seen = 0
        for batch in site.training_batches():  # read once for all three
            for name in ("global", "personal"):  # Alg. 1, lines 8 and 9
                with site.autocast():
                    loss = site.task.loss(site.models[name](batch.inputs), batch.targets)
                site.step(name, loss)
            with site.autocast():
                outputs = selector(batch.inputs)
            # Eq. (2): every sample of this hospital has the hospital itself as its class.
            mine = torch.full((len(batch.inputs),), site.index, device=outputs.device)
            loss = nn.functional.cross_entropy(outputs.float(), mine, reduction="sum")
            for key, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
                total[key] += gradient
            seen += len(batch.inputs)
        site.outbox["selector"] = {f"selector.{key}": gradient / seen for key, gradient in total.items()}

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """Share of this hospital's samples that the selector gives to this hospital."""
        with torch.inference_mode():
            chosen: list[Tensor] = [
                models["selector"](samples.inputs[start : start + 256].to(device)).argmax(dim=1).cpu()
                for start in range(0, len(samples), 256)
            ]
        return {"selector_accuracy": float((torch.cat(chosen) == index).double().mean())}
