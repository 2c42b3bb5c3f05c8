# SPDX-License-Identifier: Apache-2.0
"""FedSM's super model: the global model, every hospital's personal model, and the selector between them.

Xu et al., CVPR 2022, Algorithm 2, and the rules of FedSM-extra and the ensemble. Deviation: who evaluates or predicts
asks ``choose`` once a case. A volume's scores are the mean of its slices' log-probabilities, so that all its slices are
segmented by one model; the paper decides image by image, as ``predict`` does.
"""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.methods.base import Build, Method, Site
from medpfl.methods.fedsm_extra import FedSMEnsemble, weighted_sum

GLOBAL = "global"


@dataclass(frozen=True, kw_only=True)
class SuperModel(Method):
    """It is not trained: ``medpfl super`` puts it together from what a job left at the server.

    Args:
        trained: the method that trained it, with the networks "global", "personal" and "selector".
        hospitals: whose personal models it holds, in the order of the selector's classes.
        gamma: in [0, 1]: the selector must be surer than that, else the global model serves the case; 1: always the
            global model, below 1/K: always a personal one. None, for a selector that has the global model as its
            first class (FedSM-extra): its most probable class serves.
    """

    deploys: ClassVar = {"super": GLOBAL}

    trained: Method
    hospitals: tuple[str, ...]
    gamma: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hospitals", tuple(self.hospitals))  # JSON has lists
        if self.gamma is not None and not (math.isfinite(self.gamma) and 0 <= self.gamma <= 1):
            raise ConfigError(f"SuperModel's gamma must be in [0, 1], got {self.gamma}")
        if not self.hospitals or len(set(self.hospitals)) < len(self.hospitals):
            raise ConfigError(f"SuperModel's hospitals must be different names, got {list(self.hospitals)}")

    @property
    def ensemble(self) -> bool:
        """Whether all networks serve every input, weighted by the selector's probabilities."""
        return isinstance(self.trained, FedSMEnsemble)

    @property
    def networks(self) -> list[str]:
        """Names of the networks to choose from: the global model, then the hospitals' personal ones."""
        return [GLOBAL, *(f"personal_{index}" for index in range(len(self.hospitals)))]

    @property
    def labels(self) -> list[str]:
        """What they are called towards people: "global", then the hospitals."""
        return [GLOBAL, *self.hospitals]

    def models(self, build: Build) -> dict[str, nn.Module]:
        if len(build.roster) != len(self.hospitals):
            raise ConfigError(
                f"the super model names {len(self.hospitals)} hospitals, its file says {len(build.roster)}"
            )
        parts = self.trained.models(build)
        for name in (GLOBAL, "personal", "selector"):
            if name not in parts:
                raise ConfigError(f"{type(self.trained).__name__} has no network '{name}', so it makes no super model")
        personal = {name: copy.deepcopy(parts["personal"]) for name in self.networks[1:]}
        return {GLOBAL: parts[GLOBAL], **personal, "selector": parts["selector"]}

    def local_round(self, site: Site) -> None:
        raise ConfigError("a super model is not trained: train FedSM, then 'medpfl super'")

    def scores(self, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        """The selector's log-probabilities of N inputs, N x K (or N x (K + 1), the global model first)."""
        found = torch.log_softmax(models["selector"](inputs).float(), dim=1)
        expected = len(self.hospitals) + (self.gamma is None)
        if found.shape[1] != expected:
            first = " and the global model" if self.gamma is None else ""
            raise ConfigError(
                f"the selector has {found.shape[1]} classes; for {len(self.hospitals)} hospitals{first} it needs "
                f"{expected}: " + ("give a gamma" if self.gamma is None else "leave gamma out")
            )
        return found

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of N rows of log-probabilities the index into ``networks`` (N, int64) and how sure the selector is (N)."""
        sure, found = scores.softmax(dim=1).max(dim=1)
        if self.gamma is None:
            return found, sure
        return torch.where(sure > self.gamma, found + 1, torch.zeros_like(found)), sure

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        """Input by input: each by the network chosen for it, or by all of an ensemble."""
        return self.combine(models, inputs, inputs)

    def combine(self, models: nn.ModuleDict, inputs: Tensor, seen: Tensor) -> Tensor:
        """The same, with what the selector shall see of the inputs."""
        scores = self.scores(models, seen)
        outputs = torch.stack([models[network](inputs) for network in self.networks], dim=1)
        if self.ensemble:
            return weighted_sum(scores, outputs)
        index = self.choose(scores)[0].view(-1, 1, *[1] * (outputs.dim() - 2)).expand_as(outputs[:, :1])
        return outputs.gather(1, index)[:, 0]
