# SPDX-License-Identifier: Apache-2.0
"""pFedNet: part of the network is averaged, the other part is drawn towards that of similar hospitals.

Zhao, Liu, Liu, Liu, He, "Medical Federated Model with Mixture of Personalized and Shared Components", Algorithms 1, 2
and 5. The update of the personal part is the server component ``medpfl.core.mixers.NetworkProx`` of slot "personal".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.frozen import training_only
from medpfl.core.graph import SKETCHES
from medpfl.core.groups import head_of, of_type, running_statistics, under, without
from medpfl.core.mixers import Mean, Mixer, NetworkProx
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.features import check_head
from medpfl.methods.pfednet.sketches import sketch
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class PFedNet(Method):
    """Slots "shared" (uniform mean) and "personal" (NetworkProx); only "personal" if everything is personal.

    With ``steps`` 1 and "sgd" a hospital makes the one stochastic gradient of Algorithm 1, else it trains on.

    Args:
        personal: module paths inside the network that are personal, "" for all of it; none (and no types): its head.
        personal_types: names of ``torch.nn`` classes all of whose modules are personal, "Linear" say.
        alternate: Algorithm 5's (I, J) instead of Algorithm 2: every round exchanges the personal part with the shared
            one fixed, and after every J-th round the shared part is exchanged I times with the personal one fixed.
        local_statistics: BatchNorm's running statistics stay at the hospital (Andreux et al., "Siloed Federated
            Learning for Multi-Centric Histopathology Datasets", 2020). Codecs do not encode them.
    """

    personal: tuple[str, ...] = ()
    personal_types: tuple[str, ...] = ()
    alternate: tuple[int, int] | None = None
    local_statistics: bool = False

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover()
    passes: ClassVar = None
    refined: ClassVar = ("shared",)
    delivered: ClassVar = ("personal",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate is not None and min(self.alternate) < 1:
            raise ConfigError(f"PFedNet's alternate must be two whole numbers from 1, got {list(self.alternate)}")
        for name in self.personal_types:
            if not isinstance(getattr(nn, name, None), type) or not issubclass(getattr(nn, name), nn.Module):
                raise ConfigError(f"PFedNet's personal_types: torch.nn has no module class '{name}'")

    def check_length(self, rounds: int) -> None:
        if self.alternate is not None and self.alternate[1] > rounds:
            raise ConfigError(
                f"PFedNet's alternate is {list(self.alternate)}, and the job has {rounds} rounds: the shared part is "
                f"trained after every {self.alternate[1]} rounds only, and would stay as it began"
            )

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        parts = self._parts(models)
        if self.local_statistics:
            kept = running_statistics(models, "model", "PFedNet's local_statistics")
            parts = {part: without(keys, kept) for part, keys in parts.items()}
        if parts["shared"]:
            return parts
        if self.alternate:
            raise ConfigError("PFedNet cannot alternate where everything is personal")
        return {"personal": parts["personal"]}

    def _parts(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        """All that the layers of either part hold, statistics that stay at the hospital included."""
        every = under(models, "model")
        chosen: set[str] = set()
        for path in self.personal:
            chosen |= set(under(models, f"model.{path}" if path else "model"))
        if self.personal_types:
            types = tuple(getattr(nn, name) for name in self.personal_types)
            chosen |= set(of_type(models, types, "model", "PFedNet's personal_types"))
        if not chosen:
            network = models.get_submodule("model")
            chosen = set(under(models, f"model.{head_of(network)}"))
        return {"shared": without(every, chosen), "personal": [key for key in every if key in chosen]}

    def components(self) -> dict[str, Mixer]:
        return {"shared": Mean(uniform=True), "personal": NetworkProx(tau=0.1)}

    def statistics(self, name: str, site: Site) -> dict[str, Tensor]:
        return sketch(name, site) if name in SKETCHES else super().statistics(name, site)

    def local_round(self, site: Site) -> None:
        if not (self.personal or self.personal_types):
            check_head(site, site.models["model"], None, "name another one in PFedNet's 'personal'")
        if self.alternate:
            self._fit(site, self._parts(site.models)["personal"])
        else:
            site.fit("model")

    def refinements(self, round_number: int, rounds: int) -> int:
        if self.alternate is None:
            return 0
        exchanges, every = self.alternate
        return exchanges if round_number % every == 0 else 0

    def refine(self, site: Site, step: int) -> None:
        self._fit(site, self._parts(site.models)["shared"], step)

    def _fit(self, site: Site, trained: Sequence[str], step: int = 0) -> None:
        """Train these tensors only, BatchNorm statistics included; what is fixed is in evaluation mode."""
        network = site.models["model"]
        keys = {key.removeprefix("model.") for key in trained}
        network.train()
        for name, module in network.named_modules():
            own = [f"{name}.{key}".removeprefix(".") for key in module.state_dict() if "." not in key]
            if own and not keys.intersection(own):
                module.training = False
        # An exchange within a round has batches and an optimiser of its own: the kept one is of the round's training.
        working = site.apart() if step else site
        with training_only(network, keys):
            for batch in working.training_batches(purpose=f"exchange {step}" if step else "batches"):
                with working.autocast():
                    loss = working.task.loss(network(batch.inputs), batch.targets)
                working.step("model", loss)
