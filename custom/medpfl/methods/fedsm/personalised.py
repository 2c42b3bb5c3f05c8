# SPDX-License-Identifier: Apache-2.0
"""FedSM with personal models of another method (Xu et al., CVPR 2022, Table 6): fine-tuning, APFL, Per-FedAvg, pFedMe.

Any method of this package whose personal model is one network, and that needs neither public data nor exchanges within
a round, can be named; its own rounds run unchanged. After its local training the network that it deploys is copied into
FedSM's slot "personal", which the server keeps as it is (SoftPull with lam 1), because the super model needs all of
them. What a method does after mixing to get that network (APFL mixes, Per-FedAvg takes its step) is done here at the
end of the local training, with the hospital's own copy of what is mixed.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer, NoDefault, SoftPull
from medpfl.data.samples import Samples
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.fedsm.method import FedSM
from medpfl.methods.fine_tuned import FineTuned
from medpfl.methods.training import Training

PREFIX = "own_"


@dataclass(frozen=True, kw_only=True)
class FedSMPersonalised(FedSM):
    """Slots: "global", "personal" and "selector" as in FedSM, and the personaliser's with "own_" before their names.

    Args:
        personaliser: the method that trains the personal models, with its own arguments; those that every method has
            (``Training``) are FedSM's for both.
    """

    personaliser: Method = field(default_factory=FineTuned)

    in_one_pass: ClassVar = ("global",)
    after_steps: ClassVar = ("personal",)
    cover: ClassVar = FedSM.cover

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.personaliser, FedSM):
            raise ConfigError(f"FedSMPersonalised's personaliser must be another method, got {self.personaliser!r}")
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self.personaliser)}
        for name in (entry.name for entry in dataclasses.fields(Training)):
            given = getattr(self.personaliser, name)
            if given not in (defaults[name], getattr(self, name)):
                raise ConfigError(
                    f"FedSMPersonalised's personaliser takes {name} from FedSM; it names another, {given!r}"
                )
        object.__setattr__(self, "personaliser", self.personaliser.trained_like(self))
        if type(self.personaliser).predict is not Method.predict:
            raise self._refusal("'s personal model predicts with more than one network, and FedSM's is one network")
        if self.personaliser.public_datasets():
            raise self._refusal(" needs public data")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"FedSMPersonalised's personaliser must be one that FedSM can run: {type(self.personaliser).__name__}{why}"
        )

    def at(self, site: str) -> Method:
        return dataclasses.replace(self, personaliser=self.personaliser.at(site))

    @property
    def named_hospitals(self) -> Collection[str]:
        return self.personaliser.named_hospitals

    def check_length(self, rounds: int) -> None:
        super().check_length(rounds)
        self.personaliser.check_length(rounds)

    def models(self, build: Build) -> dict[str, nn.Module]:
        own = {f"{PREFIX}{name}": network for name, network in self.personaliser.models(build).items()}
        return {**super().models(build), **own}

    def checkpoints(self) -> list[str]:
        return self.personaliser.checkpoints()

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        slots = super().slots(models)
        for slot, keys in self.personaliser.slots(_own(models)).items():
            slots[f"{PREFIX}{slot}"] = [f"{PREFIX}{key}" for key in keys]
        return slots

    def kept(self, models: nn.ModuleDict) -> list[str]:
        return [f"{PREFIX}{key}" for key in self.personaliser.kept(_own(models))]

    def statistics(self, name: str, site: Site) -> dict[str, Tensor]:
        """The personaliser's (FedAP's, a sketch of pFedNet's)."""
        return self.personaliser.statistics(name, site.view(self.personaliser, PREFIX))

    def components(self) -> dict[str, Mixer | NoDefault]:
        own = {f"{PREFIX}{slot}": mixer for slot, mixer in self.personaliser.components().items()}
        return {**super().components(), "personal": SoftPull(lam=1.0), **own}

    @property
    def anew(self) -> tuple[str, ...]:
        return ("personal", *(f"{PREFIX}{slot}" for slot in self.personaliser.anew))

    def batches(self, samples: int, public: int = 0) -> int:
        return max(self.personaliser.batches(samples, public), super().batches(samples, public))

    def rate(self, name: str) -> float:
        if name.startswith(PREFIX):
            return self.personaliser.rate(name.removeprefix(PREFIX))
        return super().rate(name)

    def refinements(self, round_number: int, rounds: int) -> int:
        if self.personaliser.refinements(round_number, rounds):
            raise self._refusal(" exchanges slots within a round, where FedSM exchanges its selector alone")
        return super().refinements(round_number, rounds)

    @property
    def diagnoses(self) -> Sequence[str]:  # type: ignore[override]
        """FedSM's numbers, and those of the personaliser."""
        return tuple(dict.fromkeys((*FedSM.diagnoses, *self.personaliser.diagnoses)))

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        own = self.personaliser.diagnose(_own(models), samples, index, device)
        return {**own, **super().diagnose(models, samples, index, device)}

    def train_personal(self, site: Site) -> None:
        view = site.view(self.personaliser, PREFIX)
        self.personaliser.local_round(view)
        for slot, state in view.outbox.items():
            site.outbox[f"{PREFIX}{slot}"] = {f"{PREFIX}{key}": tensor for key, tensor in state.items()}
        self.personaliser.after_mixing(view)
        network = view.models[next(iter(self.personaliser.deploys.values()))]
        site.models["personal"].load_state_dict(network.state_dict())
        site.last_loss = view.last_loss


def _own(models: nn.ModuleDict) -> nn.ModuleDict:
    """The personaliser's networks, by its own names of them."""
    return nn.ModuleDict({k.removeprefix(PREFIX): network for k, network in models.items() if k.startswith(PREFIX)})
