# SPDX-License-Identifier: Apache-2.0
"""Auto: for who does not want to choose a method. It is ours, no paper describes it.

Three models that every comparison of ours showed to be best somewhere predict together: the common one (FedAvg), the
same after the hospital's own steps of the round (fine-tuning, round by round), and one that the hospital trains alone.
BatchNorm layers travel, and after every mixing a hospital takes for the common model the mixed ones or its own, which
are the tuned model's: those with which the common model loses less on its validation cases, its own in a tie. Shared
layers fail where scanners differ, and layers that stay at home, as in FedBN, cost accuracy where hospitals are alike.

The probabilities are mixed,  p = sum_k w_k p_k,  and every hospital takes for w the one of seven mixtures (each model
alone, each pair in halves, all three) with the least loss on its own validation cases; a tie goes to the mixture of
more models. Where training draws all classes alike they count alike in that loss, too, or the mixture would be taken
for what it says of the frequent class. The loss moves less by chance than the score, and seven candidates can be told
apart by few cases.

Both choices go by the mean loss of the rounds so far, of which the latest counts most: validation takes the round, too,
and where the same few cases took round and mixture by one round's loss, both fell to the same luck.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.devices import moved
from medpfl.core.groups import BATCH_NORM, of_type, under
from medpfl.core.mixers import Mean, Mixer
from medpfl.data.resident import part_of
from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.methods.contract import BATCH, Build, Method, Site
from medpfl.privacy.contract import Cover
from medpfl.tasks.together import averaged_as, together

MEMBERS = ("own", "tuned", "shared")
MIXTURES = (
    (1 / 3, 1 / 3, 1 / 3),
    (0.5, 0.5, 0.0),
    (0.5, 0.0, 0.5),
    (0.0, 0.5, 0.5),
    (1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0),
    (0.0, 0.0, 1.0),
)
"""Shares of the ``MEMBERS``."""
KEPT = 0.8
"""How much of a round's part in the mean loss is left with each further round, so that about five rounds count."""


class Mixture(nn.Module):
    """The shares, in [0, 1], and how outputs are mixed."""

    weights: Tensor

    def __init__(self, target: Target):
        super().__init__()
        self.target = target
        self.register_buffer("weights", torch.tensor(MIXTURES[0]))

    def forward(self, *outputs: Tensor) -> Tensor:
        """Outputs, B x C x ..., of the ``MEMBERS``, as one."""
        return together(outputs, self.target, self.weights)


class Record(nn.Module):
    """The mean validation losses of the rounds so far. It is private, and no part of the deployed model.

    Args:
        rows: how many common models there are to choose from.
    """

    losses: Tensor
    weight: Tensor

    def __init__(self, rows: int):
        super().__init__()
        self.register_buffer("losses", torch.zeros(rows, len(MIXTURES), dtype=torch.float64))
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))

    def with_round(self, losses: Tensor) -> Tensor:
        """Exponentially weighted means of the losses, rows x mixtures, with those of one round more.

        A model that broke says nothing but NaN, which ``argmin`` takes for the least: its mixtures lose without bound.
        The mean begins anew for one that is sound again, as the tuned model is after the next round."""
        losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)  # else infinity is the largest number, for good
        self.losses.copy_(torch.where(self.losses.isfinite(), self.losses, losses * self.weight))
        self.losses.mul_(KEPT).add_(losses, alpha=1 - KEPT)
        self.weight.mul_(KEPT).add_(1 - KEPT)
        return self.losses / self.weight


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """Slot "shared" (mean): the common network. Private: "own" and "tuned", two networks more, the mixture and the
    record of losses. A round trains two networks and asks three for validation, the common one twice where it has
    BatchNorm."""

    deploys: ClassVar = {"personal": "mix"}
    cover: ClassVar = Cover(at_home=("own",))
    diagnoses: ClassVar = MEMBERS

    def models(self, build: Build) -> dict[str, nn.Module]:
        networks = {name: build.network() for name in MEMBERS}
        record = Record(1 + _has_norm(networks["shared"]))
        return {**networks, "mix": Mixture(averaged_as(build.task.spec)), "record": record}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"shared": under(models, "shared")}

    def components(self) -> dict[str, Mixer]:
        return {"shared": Mean()}

    def local_round(self, site: Site) -> None:
        site.fit("own")
        site.fit("shared")  # whose loss is the one that is reported
        site.models["tuned"].load_state_dict(site.models["shared"].state_dict())

    def after_mixing(self, site: Site) -> None:
        """Choose the common model's BatchNorm layers, then the mixture. Without validation cases the layers are the
        hospital's own, and the mixture stays the mean of all three."""
        layers = _norm_layers(site.models)
        at_home = torch.tensor(True, device=site.device)
        samples = site.data.splits["validation"]
        if len(samples):
            record = site.models["record"]
            assert isinstance(record, Record)
            losses = record.with_round(self._losses(site, samples, layers))
            at_home = losses[-1, -1] <= losses[0, -1]  # of the common model alone, the last mixture
            candidates = moved(torch.tensor(MIXTURES), site.device)
            best = torch.where(at_home, losses[-1], losses[0]).argmin()
            site.models["mix"].get_buffer("weights").copy_(candidates[best])
        with torch.no_grad():
            for mixed, own in layers:
                mixed.copy_(torch.where(at_home, own, mixed))

    def _losses(self, site: Site, samples: Samples, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Mean loss of a case with every mixture (of classes that count alike, the sum of their means): a row with the
        common model as it was mixed, and one with the hospital's own BatchNorm layers, if there are any."""
        site.models.eval()
        mix = site.models["mix"]
        assert isinstance(mix, Mixture)
        candidates, strata = moved(torch.tensor(MIXTURES), site.device), site.task.strata(samples)
        losses = torch.zeros(1 + bool(layers), len(MIXTURES), dtype=torch.float64, device=site.device)
        size = samples.together(BATCH)
        with torch.no_grad():
            for start in range(0, len(samples), size):
                part = slice(start, start + size)
                inputs = part_of(samples.inputs, part, site.device)
                targets = part_of(samples.targets, part, site.device)
                *others, common = (site.models[name](inputs) for name in MEMBERS)
                commons = [common, *_at_home(site.models["shared"], inputs, layers)]
                for row, shared in zip(losses, commons, strict=True):
                    mixed = [together([*others, shared], mix.target, weights) for weights in candidates]
                    for stratum in strata:
                        here = stratum[(stratum >= start) & (stratum < start + size)] - start
                        if len(here):
                            share, rows = len(here) * (len(samples) / len(stratum)), moved(here, site.device)
                            for number, one in enumerate(mixed):
                                row[number] += share * site.task.loss(one[rows], targets[rows])
        return losses / len(samples)

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        found: Tensor = models["mix"](*(models[member](inputs) for member in MEMBERS))
        return found

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """The members' shares."""
        weights = models["mix"].get_buffer("weights").tolist()
        return dict(zip(MEMBERS, weights, strict=True))


def _has_norm(network: nn.Module) -> bool:
    return any(isinstance(module, BATCH_NORM) for module in network.modules())


def _norm_layers(models: nn.ModuleDict) -> list[tuple[Tensor, Tensor]]:
    """The common model's BatchNorm tensors, each with the tuned model's, which is the hospital's own."""
    if not _has_norm(models["shared"]):
        return []
    state = models.state_dict()
    keys = of_type(models, BATCH_NORM, "shared", "Auto")
    return [(state[key], state[f"tuned{key.removeprefix('shared')}"]) for key in keys]


def _at_home(network: nn.Module, inputs: Tensor, layers: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What it says with the hospital's own BatchNorm layers, if there are any; they are put back."""
    if not layers:
        return []
    before = [mixed.clone() for mixed, _ in layers]
    for mixed, own in layers:
        mixed.copy_(own)
    found: Tensor = network(inputs)
    for (mixed, _), kept in zip(layers, before, strict=True):
        mixed.copy_(kept)
    return [found]
