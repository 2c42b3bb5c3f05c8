# SPDX-License-Identifier: Apache-2.0
"""A small method and component that use every exchange there is: statistics before a round, and several within one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.mixers import Mean, Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State
from medpfl.methods.contract import Build, Method, Site


@dataclass(frozen=True)
class ByMean(Mixer):
    """Every hospital hears those whose features have a mean like its own; asks before rounds 1 and 3."""

    _known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def wants(self, round_number: int, hospitals: int) -> str | None:
        return "means" if round_number in (1, 3) else None

    def take_statistics(self, statistics: Sequence[State | None], info: RoundInfo) -> None:
        rows = [torch.full((3,), torch.nan).double() if given is None else given["mean"] for given in statistics]
        self._known["means"] = torch.stack(rows)

    def matrix(self, info: RoundInfo) -> Matrix:
        means = self._known["means"]
        near = torch.exp(-torch.cdist(means, means).nan_to_num(1e6)) + 1e-300
        return (near / near.sum(dim=1, keepdim=True)).numpy()

    def state(self) -> dict[str, Tensor]:
        return dict(self._known)

    def load_state(self, state: State) -> None:
        self._known.update({key: tensor.clone() for key, tensor in state.items()})


@dataclass(frozen=True, kw_only=True)
class Asked(Method):
    """Trains one network; a second one, "note", is exchanged twice more in every round and thrice more in the last."""

    deploys: ClassVar = {"personal": "model"}
    refined: ClassVar = ("note",)

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network(), "note": nn.Linear(1, 1, bias=False)}

    def components(self) -> dict[str, Mixer]:
        return {"model": Mean(), "note": Mean()}

    def statistics(self, name: str, site: Site) -> dict[str, Tensor]:
        if name != "means":
            return super().statistics(name, site)
        return {"mean": site.data.splits["train"].inputs[:].double().mean(dim=0)}

    def local_round(self, site: Site) -> None:
        site.fit("model")
        site.outbox["note"] = {"note.weight": torch.zeros(1, 1)}

    def refinements(self, round_number: int, rounds: int) -> int:
        return 3 if round_number == rounds else 2

    def refine(self, site: Site, step: int) -> None:
        with torch.no_grad():
            site.models["note"].weight += step * (site.index + 1)


def slots() -> dict[str, Mixer]:
    return {"model": ByMean(), "note": Mean()}
