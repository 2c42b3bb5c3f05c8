# SPDX-License-Identifier: Apache-2.0
"""FedSM's two other selectors, trained when the models between which they choose are finished.

Xu et al., CVPR 2022, Section 3.1: FedSM-extra (Eq. (1), Algorithm 3) and the ensemble. Both choose among K + 1 models:
0 is the global one, k + 1 the personal one of hospital k. Their selector is trained after the last round only, in
``selector_steps`` exchanges of its own.

For its labels, or its ensemble, a hospital runs all K + 1 models on its own data. So the server sends every hospital
the global and all K personal models once, with the first of these exchanges: every hospital then holds a model that
was trained on each other hospital's data, though softly pulled towards all.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from medpfl.core.devices import moved
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.tied import call_with
from medpfl.data.resident import part_of
from medpfl.data.samples import Samples
from medpfl.methods.contract import Site
from medpfl.methods.fedsm import selecting
from medpfl.methods.fedsm.method import FedSM
from medpfl.methods.fedsm.super_model import weighted_sum


@dataclass(frozen=True, kw_only=True)
class FedSMExtra(FedSM):
    """A sample's class is the model with the least loss on it; of equal ones the first.

    Args:
        selector_steps: exchanges of the selector after the last round, >= 1.
    """

    selector_steps: int = 100

    diagnoses: ClassVar = ("selector_global", "selector_own")
    shown: ClassVar = ("global", "personal")
    waiting: ClassVar = ("selector",)
    cover: ClassVar = FedSM.cover

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selector_training == "local_steps":
            raise ConfigError(f"{type(self).__name__}'s selector_training cannot be 'local_steps'")

    def candidates(self, roster: tuple[str, ...]) -> int:
        return len(roster) + 1

    def train_selector(self, site: Site) -> None:
        """Nothing before the last round is over: its gradient is zero."""
        if self.selector_training == "server_adam":
            weights = site.models["selector"].named_parameters()
            site.outbox["selector"] = {f"selector.{key}": torch.zeros_like(weight) for key, weight in weights}

    def refinements(self, round_number: int, rounds: int) -> int:
        return self.selector_steps if round_number == rounds else 0

    def refine(self, site: Site, step: int) -> None:
        data = selecting.seen(site, self.selector_samples)
        labels = site.keep("labels", lambda: torch.from_numpy(_losses(site, data.places).argmin(axis=1)))

        def loss(logits: Tensor, numbers: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits, moved(labels[numbers], logits.device), reduction="sum")

        self.step_selector(site, loss)

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """Share of this hospital's samples that the selector gives to the global and to this hospital's own model."""
        models["selector"].eval()
        size = samples.together(64)
        with torch.no_grad():
            chosen = torch.cat(
                [
                    models["selector"](part_of(samples.inputs, slice(start, start + size), device)).argmax(dim=1)
                    for start in range(0, len(samples), size)
                ]
            )
        share = torch.bincount(chosen.cpu(), minlength=index + 2) / len(chosen)
        return {"selector_global": float(share[0]), "selector_own": float(share[index + 1])}


@dataclass(frozen=True, kw_only=True)
class FedSMEnsemble(FedSMExtra):
    """The prediction is the sum of all K + 1 models' outputs, weighted by the selector's probabilities; the selector is
    trained through its loss. The outputs on the kept training samples stay in memory."""

    ensemble: ClassVar = True
    cover: ClassVar = FedSM.cover

    def refine(self, site: Site, step: int) -> None:
        data = selecting.seen(site, self.selector_samples)
        outputs = site.keep("outputs", lambda: torch.stack(list(_outputs(site, data.places)), dim=1))
        targets = site.data.splits["train"].targets[data.places]

        def loss(logits: Tensor, numbers: Tensor) -> Tensor:
            found = weighted_sum(logits, moved(outputs[numbers], logits.device))
            return site.task.loss(found, moved(targets[numbers], logits.device)) * len(numbers)

        self.step_selector(site, loss, site.task.importance(targets))


def _outputs(site: Site, places: Tensor) -> list[Tensor]:
    """Outputs of the K + 1 models on these training samples, each n x ..., on the CPU.

    Raises:
        MedPFLError: the models did not come, because this hospital missed the first exchange.
    """
    if not site.shown:
        raise MedPFLError(
            "the other hospitals' models did not arrive", public="the models to choose from did not arrive"
        )
    samples = site.data.splits["train"]
    candidates = [("global", site.shown["global"][0]), *(("personal", state) for state in site.shown["personal"])]
    found = []
    for name, state in candidates:
        network = site.models[name].eval()
        entries = {key.removeprefix(f"{name}."): moved(tensor, site.device) for key, tensor in state.items()}
        with torch.no_grad():
            parts = [
                call_with(network, entries, moved(samples.inputs[part], site.device)).float().cpu()
                for part in torch.split(places, samples.together(64))
            ]
        found.append(torch.cat(parts))
    return found


def _losses(site: Site, places: Tensor) -> np.ndarray:
    """Loss of every model on every sample, n x (K + 1), infinity where it is no number, which argmin would take for the
    least; numpy, whose argmin takes the first of equal ones."""
    targets = site.data.splits["train"].targets[places]
    table = np.empty((len(places), len(site.roster) + 1))
    for column, outputs in enumerate(_outputs(site, places)):
        for row in range(len(places)):
            table[row, column] = float(site.task.loss(outputs[row : row + 1], targets[row : row + 1]))
    return np.where(np.isnan(table), np.inf, table)
