# SPDX-License-Identifier: Apache-2.0
"""Local training: every hospital alone. The reference that a federation must beat."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.mixers import Identity, Mixer
from medpfl.methods.contract import Build, Method, Site
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Nothing is exchanged: the server component is the identity, and the slot stays home."""

    deploys: ClassVar = {"local": "local"}
    cover: ClassVar = Cover(at_home=("local",))
    after_steps: ClassVar = ("local",)

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"local": build.network()}

    def components(self) -> dict[str, Mixer]:
        return {"local": Identity()}

    def local_round(self, site: Site) -> None:
        site.fit("local")


@dataclass(frozen=True, kw_only=True)
class Pooled(Local):
    """Local training at a single place that holds all hospitals' data, under the name of what it deploys there. Only a
    comparison on one machine does this (``medpfl.compare.pooled``)."""

    deploys: ClassVar = {"pooled": "local"}
    after_steps: ClassVar = ("pooled",)
