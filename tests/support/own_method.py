# SPDX-License-Identifier: Apache-2.0
"""A method of another package, as somebody would write it who reads CONTRIBUTING.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.methods.contract import Build, Method, Site


@dataclass(frozen=True, kw_only=True)
class Ours(Method):
    """FedAvg in the least words."""

    deploys: ClassVar[Mapping[str, str]] = {"mine": "model"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def local_round(self, site: Site) -> None:
        site.fit("model")


@dataclass(frozen=True, kw_only=True)
class Parted(Ours):
    """Its slots are parts of its network, and it says of none how the server mixes it."""

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {part: [key for key in models.state_dict() if key.endswith(part)] for part in ("bias", "weight")}
