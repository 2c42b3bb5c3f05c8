# SPDX-License-Identifier: Apache-2.0
"""FedSM's super model: the global model, every hospital's personal model, and the selector between them.

Xu et al., CVPR 2022, Algorithm 2, and the rules of FedSM-extra and the ensemble. Deviation: who evaluates or predicts
asks ``choose`` once a case. A volume's scores are the mean of its slices' log-probabilities, so that all its slices are
segmented by one model; the paper decides image by image, as ``predict`` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medpfl.core.copied import copied
from medpfl.core.errors import ConfigError
from medpfl.data.resident import part_of
from medpfl.data.rows import Rows
from medpfl.data.samples import Samples, SiteData
from medpfl.methods.as_in_training import as_in_training
from medpfl.methods.contract import BATCH, Build, JointModel, Served, Site
from medpfl.methods.fedsm.gamma import GAMMAS, choose_gamma, read_study
from medpfl.methods.joint_study import Found, Point, SplitStudy, Study
from medpfl.methods.panels import AtServer, Panel, SharesPanel
from medpfl.models.selector import by_case, with_content
from medpfl.tasks.contract import Task
from medpfl.tasks.inference import decide_samples
from medpfl.tasks.metrics.measure import Measure

GLOBAL = "global"
USUAL_GAMMA = 0.9
"""Where nothing is said: what NVFlare's research example tests with."""


@dataclass(frozen=True, kw_only=True)
class SuperModel(JointModel):
    """It is not trained: ``medpfl super`` puts it together from what a job left at the server.

    Args:
        trained: the method that trained it, with the networks "global", "personal" and "selector".
        hospitals: whose personal models it holds, in the order of the selector's classes.
        gamma: in [0, 1]: the selector must be surer than that, else the global model serves the case; 1: always the
            global model, below 1/K: always a personal one. None, for a selector that has the global model as its
            first class (FedSM-extra): its most probable class serves.
    """

    deploys: ClassVar = {"super": GLOBAL}

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hospitals", tuple(self.hospitals))  # JSON has lists
        if self.gamma is not None and not 0 <= self.gamma <= 1:
            raise ConfigError(f"SuperModel's gamma must be in [0, 1], got {self.gamma}")
        if not self.hospitals or len(set(self.hospitals)) < len(self.hospitals):
            raise ConfigError(f"SuperModel's hospitals must be different names, got {list(self.hospitals)}")

    @property
    def ensemble(self) -> bool:
        """Whether all networks serve every input, weighted by the selector's probabilities."""
        return bool(getattr(self.trained, "ensemble", False))

    @property
    def networks(self) -> list[str]:
        """Names of the networks to choose from: the global model, then the hospitals' personal ones."""
        return [GLOBAL, *(f"personal_{index}" for index in range(len(self.hospitals)))]

    @property
    def labels(self) -> list[str]:
        """What they are called towards people: "global", then the hospitals."""
        return [GLOBAL, *self.hospitals]

    @property
    def _tried(self) -> tuple[float | None, ...]:
        """The thresholds of a study."""
        return (None,) if self.gamma is None else GAMMAS

    def sources(self) -> dict[str, tuple[str, str | None]]:
        personal = dict(zip(self.networks[1:], self.hospitals, strict=True))
        return {GLOBAL: (GLOBAL, None), **{name: ("personal", site) for name, site in personal.items()},
                "selector": ("selector", None)}  # fmt: skip

    def with_gamma(self, gamma: float | None) -> Self:
        if gamma is not None and self.gamma is None:
            raise ConfigError("this selector has the global model among its classes, so it takes no gamma")
        return replace(self, gamma=gamma)

    def models(self, build: Build) -> dict[str, nn.Module]:
        if len(build.roster) != len(self.hospitals):
            raise ConfigError(
                f"the super model names {len(self.hospitals)} hospitals, its file says {len(build.roster)}"
            )
        parts = self.trained.models(build)
        for name in (GLOBAL, "personal", "selector"):
            if name not in parts:
                raise ConfigError(f"{type(self.trained).__name__} has no network '{name}', so it makes no super model")
        personal = {name: copied(parts["personal"]) for name in self.networks[1:]}
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

    def case_scores(self, models: nn.ModuleDict, inputs: Rows, case: NDArray[np.int64], device: torch.device) -> Tensor:
        """Log-probabilities of each case, from the mean over its samples with content: cases x classes.

        Args:
            inputs: N samples.
            case: N indices of their cases, from 0.
        """
        scores, content = [], []
        with torch.inference_mode():
            for start in range(0, len(inputs), BATCH):
                part = inputs[start : start + BATCH]  # of whole cases their views, as the selector was trained on
                scores.append(self.scores(models, part_of(inputs, slice(start, start + BATCH), device)).cpu())
                content.append(with_content(part))
        return by_case(torch.cat(scores), case, torch.cat(content))

    def decide_cases(
        self, name: str, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device
    ) -> Tensor:
        """Each case by the network chosen for it; an ensemble has nothing to choose."""
        if self.ensemble:
            return super().decide_cases(name, models, task, samples, device)
        chosen, _ = self.choose(self.case_scores(models, samples.inputs, samples.case, device))
        network = chosen[torch.from_numpy(samples.case)]
        entries = network.repeat_interleave(samples.entries)
        decisions: Tensor | None = None
        for index in torch.unique(network).tolist():
            rows = (network == index).nonzero()[:, 0]
            part = decide_samples(task, models[self.networks[index]], samples, device, rows)
            if decisions is None:
                decisions = part.new_empty((len(entries), *part.shape[1:]))
            decisions[entries == index] = part
        assert decisions is not None
        return decisions

    def serve(
        self, name: str, models: nn.ModuleDict, inputs: Tensor, shape: Sequence[int], device: torch.device
    ) -> Served:
        """The network chosen for the case, or all of an ensemble; told: who served, and how sure the selector was."""
        case = np.zeros(len(inputs), dtype=np.int64)
        # The selector averages over all it is shown.
        chosen, sure = self.choose(self.case_scores(models, as_in_training(inputs, shape), case, device))
        told: dict[str, str | float] = {"served_by": self.labels[int(chosen)], "selector": round(float(sure), 6)}
        if self.ensemble:
            together = partial(self._as_one, models, shape)
            return Served(together, {**told, "served_by": "all"})
        return Served(models[self.networks[int(chosen)]], told)

    def _as_one(self, models: nn.ModuleDict, shape: Sequence[int], inputs: Tensor) -> Tensor:
        """An ensemble's outputs."""
        return self.combine(models, inputs, as_in_training(inputs, shape))

    def study(self, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device) -> Study:
        models.eval()
        test = self._study(models, task, data.splits["test"], device)
        if test is None:
            raise ConfigError("the test split is empty")
        return Study(validation=self._study(models, task, data.splits["validation"], device), test=test)

    def _study(self, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device) -> SplitStudy | None:
        if not len(samples):
            return None
        case = torch.from_numpy(samples.case)
        scores = self.case_scores(models, samples.inputs, samples.case, device)
        decisions = [decide_samples(task, models[name], samples, device) for name in self.networks]
        points = []
        for gamma in self._tried:
            chosen, _ = replace(self, gamma=gamma).choose(scores)
            if self.ensemble:
                mixed = decide_samples(task, partial(self.predict, "super", models), samples, device)
            else:
                mixed = _picked(decisions, chosen[case].repeat_interleave(samples.entries))
            counts = torch.bincount(chosen, minlength=len(decisions)).tolist()
            points.append(Point(gamma=gamma, score=_score(task, mixed, samples), counts=counts))
        alone = [_score(task, decision, samples) for decision in decisions]
        return SplitStudy(cases=len(samples.names), alone=alone, points=points)

    def read_study(self, site: str, content: object) -> Study:
        return read_study(site, content, len(self.hospitals), self._tried)

    def report_panels(self, known: AtServer) -> list[Panel]:
        """How often the selector chose each model for a hospital's test cases, with this gamma."""
        shares = {}
        for site, study in known.studies.items():
            assert isinstance(study, Study)
            counts = next((point.counts for point in study.test.points if point.gamma == self.gamma), None)
            if counts is not None:  # other gammas than GAMMAS were not tried
                shares[site] = {
                    label: round(count / study.test.cases, 6) for label, count in zip(self.labels, counts, strict=True)
                }
        if not shares:
            return []
        threshold = "" if self.gamma is None else f", with gamma {self.gamma:g}"
        note = f"Shares of the hospital's test cases; the selector chose case by case{threshold}."
        return [SharesPanel(title="Which model served whose cases", shares=shares, note=note)]

    def choose_gamma(self, studies: Mapping[str, Study], measure: Measure) -> Found:
        return choose_gamma(studies, self.hospitals, measure)


def weighted_sum(logits: Tensor, outputs: Tensor) -> Tensor:
    """The ensemble's output, b x ..., from the selector's logits, b x (K + 1), and all models', b x (K + 1) x ..."""
    weights = logits.float().softmax(dim=1)
    return (weights.view(*weights.shape, *[1] * (outputs.ndim - 2)) * outputs).sum(dim=1)


def _picked(decisions: list[Tensor], network: Tensor) -> Tensor:
    """Of every entry of the decisions that of the network with its index."""
    mixed = torch.empty_like(decisions[0])
    for index in torch.unique(network).tolist():
        mixed[network == index] = decisions[index][network == index]
    return mixed


def _score(task: Task, decisions: Tensor, samples: Samples) -> float | None:
    value = task.evaluate(decisions, samples, [task.metric(task.score)]).metrics[task.score]
    return float(value) if value == value else None
