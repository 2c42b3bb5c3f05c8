# SPDX-License-Identifier: Apache-2.0
"""FedSM's training: a global model, softly pulled personal models, and a selector between them.

Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022, Algorithm 1.
Deviation: a hospital sends its selector's mean gradient and the server takes the Adam step (``ServerAdam``), several
times a round, because local steps on the single class that a hospital holds collapse. The other schemes are options.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer, NoDefault, ServerAdam, SoftPull
from medpfl.data.resident import part_of
from medpfl.data.samples import Samples
from medpfl.methods.contract import Batch, Build, Method, Site
from medpfl.methods.fedsm import selecting
from medpfl.methods.fedsm.super_model import USUAL_GAMMA, SuperModel
from medpfl.models.contract import Architecture
from medpfl.models.selector import Selector, Signature, by_case, with_content
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedSM(Method):
    """Slots: "global" (mean), "personal" (SoftPull), "selector" (ServerAdam; with another training the mean).

    Args:
        selector: the selector's architecture.
        selector_training: "server_adam": the hospitals send mean gradients. "averaged_moments": every hospital takes
            one full-batch Adam step, weights and both moments are averaged (the scheme of NVFlare's example).
            "local_steps": Algorithm 1 to the letter, a step of the method's optimiser a batch; for study.
        selector_steps: exchanges of the selector a round, >= 1, the one with the other models included; "local_steps"
            has just that one.
        selector_samples: training samples, at most, whose signatures a hospital keeps for the selector, >= 1; the
            policy's 'least_update' asks for a least.
        selector_lr: step size at the hospital; that of "server_adam" is its server component's.
    """

    selector: Architecture = field(default_factory=Signature)
    selector_training: Literal["server_adam", "averaged_moments", "local_steps"] = "server_adam"
    selector_steps: int = 10
    selector_samples: int = 512
    selector_lr: float = 1e-3

    deploys: ClassVar = {"personal": "personal", "global": "global"}
    cover: ClassVar[Cover] = Cover(record="its selector's gradients are of signatures of the cases, and have no noise")
    diagnoses: ClassVar = ("selector_accuracy", "selector_accuracy_cases")
    refined: ClassVar = ("selector",)
    in_one_pass: ClassVar[tuple[str, ...]] = ("global", "personal")
    """Networks that are trained on the task, batch by batch together."""
    ensemble: ClassVar[bool] = False
    """Whether all models serve every case of the super model, weighted by the selector's probabilities."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("selector_steps", "selector_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{type(self).__name__}'s {name} must be at least 1, got {getattr(self, name)}")
        if self.selector_lr <= 0:
            raise ConfigError(f"{type(self).__name__}'s selector_lr must be above 0, got {self.selector_lr}")
        if self.selector_training == "local_steps" and self.selector_steps != 1:
            raise ConfigError(
                f"{type(self).__name__}'s selector_steps must be 1 with the training 'local_steps', "
                f"got {self.selector_steps}"
            )

    def candidates(self, roster: tuple[str, ...]) -> int:
        """Number of models between which the selector chooses."""
        return len(roster)

    def models(self, build: Build) -> dict[str, nn.Module]:
        selector = build.seeded(lambda: self.selector.build(build.input_shape, self.candidates(build.roster)))
        if not isinstance(selector, Selector):
            raise ConfigError(f"{type(self.selector).__name__} is no selector; there are: Signature, SmallCnn, Vgg11")
        models = {"global": build.network(), "personal": build.network(), "selector": selector}
        if self.selector_training == "averaged_moments":
            models["moments"] = selecting.Moments(selector)
        return models

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        slots = {name: under(models, name) for name in ("global", "personal", "selector")}
        if "moments" in models:
            slots["selector"] += under(models, "moments")
        return slots

    def components(self) -> dict[str, Mixer | NoDefault]:
        selector = ServerAdam() if self.selector_training == "server_adam" else Mean()
        return {"global": Mean(), "personal": SoftPull(), "selector": selector}

    def too_fine(self) -> str | None:
        if self.selector_training != "averaged_moments":
            return None
        return "the squares of gradients that its selector_training 'averaged_moments' averages; take 'local_steps'"

    def rate(self, name: str) -> float:
        return self.selector_lr if name == "selector" else self.lr

    def joint(self, roster: tuple[str, ...]) -> SuperModel:
        gamma = USUAL_GAMMA if self.candidates(roster) == len(roster) else None
        return SuperModel(trained=self, hospitals=roster, gamma=gamma)

    def local_round(self, site: Site) -> None:
        site.models.train()
        for batch in site.training_batches():  # read once for all
            if self.selector_training == "local_steps":
                self._local_step(site, batch)
            for name in self.in_one_pass:  # Alg. 1, lines 8 and 9
                with site.autocast():
                    loss = site.task.loss(site.models[name](batch.inputs), batch.targets)
                site.step(name, loss)
        self.train_personal(site)
        self.train_selector(site)

    def train_personal(self, site: Site) -> None:
        """What of the personal model's training is not ``in_one_pass``; nothing with SoftPull."""

    def train_selector(self, site: Site) -> None:
        """The selector's part in the exchange of all slots; after the local training."""
        if self.selector_training != "local_steps":
            self.refine(site, 0)

    def _local_step(self, site: Site, batch: Batch) -> None:
        """Alg. 1, line 11, literally."""
        outputs = site.models["selector"](batch.inputs)
        mine = torch.full((len(outputs),), site.index, device=outputs.device)
        site.step("selector", nn.functional.cross_entropy(outputs, mine))

    def refinements(self, round_number: int, rounds: int) -> int:
        return self.selector_steps - 1

    def refine(self, site: Site, step: int) -> None:
        """Eq. (2): every sample of this hospital has the hospital itself as its class."""

        def loss(logits: Tensor, numbers: Tensor) -> Tensor:
            mine = torch.full((len(logits),), site.index, device=logits.device)
            return nn.functional.cross_entropy(logits, mine, reduction="sum")

        self.step_selector(site, loss)

    def step_selector(self, site: Site, loss: selecting.Loss, counted: Tensor | None = None) -> None:
        """This hospital's part in one step of the selector down the mean ``loss`` over its kept samples; ``counted``:
        how much each counts in it."""
        found = selecting.gradient(site, selecting.seen(site, self.selector_samples), loss, counted)
        if self.selector_training == "server_adam":
            site.outbox["selector"] = {f"selector.{key}": value for key, value in found.items()}
            return
        moments = site.models["moments"]
        assert isinstance(moments, selecting.Moments)
        moments.advance(site.models["selector"], found, self.selector_lr)

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """Share of this hospital's samples, and of its cases, that the selector gives to this hospital."""
        models["selector"].eval()
        logits, content = [], []
        size = samples.together(64)
        with torch.no_grad():
            for start in range(0, len(samples), size):
                inputs = samples.inputs[start : start + size]
                logits.append(models["selector"](part_of(samples.inputs, slice(start, start + size), device)).cpu())
                content.append(with_content(inputs))
        scores, flags = torch.cat(logits), torch.cat(content)
        cases = by_case(scores, samples.case, flags)
        return {
            "selector_accuracy": _share(scores[flags] if flags.any() else scores, index),
            "selector_accuracy_cases": _share(cases, index),
        }


def _share(scores: Tensor, index: int) -> float:
    return float((scores.argmax(dim=1) == index).double().mean())
