# SPDX-License-Identifier: Apache-2.0
"""Several models that a job left at a hospital, as one: the mean of their probabilities predicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import JsonValue
from torch import Tensor, nn

from medpfl.component import build
from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError
from medpfl.data.target import Target
from medpfl.methods.base import Build, Method, Site
from medpfl.tasks.together import together


@dataclass(frozen=True)
class Member(Checked):
    """One of the models: the ``method`` that trained it, and its own name of the ``model``."""

    method: Method
    model: str

    def __post_init__(self) -> None:
        if self.model not in self.method.deploys:
            known = ", ".join(self.method.deploys)
            raise ConfigError(f"{type(self.method).__name__} deploys no model '{self.model}'; it deploys: {known}")


@dataclass(frozen=True, kw_only=True)
class Averaged(Method):
    """It is not trained: it is put together from models that were.

    Args:
        members: the models, at least two; their networks are called "m<place>_<network>".
        target: what the answer to a case is, as the models' task says; it decides what is averaged (``together``).
    """

    members: tuple[Member | Mapping[str, JsonValue], ...]
    target: str

    deploys: ClassVar = {"average": "m0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        made = tuple(one if isinstance(one, Member) else build(one, Member, "a member") for one in self.members)
        object.__setattr__(self, "members", made)
        if len(made) < 2:
            raise ConfigError(f"Averaged takes at least 2 models, got {len(made)}")
        if self.target not in tuple(Target):
            raise ConfigError(f"Averaged's target must be one of {', '.join(Target)}, got '{self.target}'")

    @property
    def _made(self) -> list[Member]:
        return [one for one in self.members if isinstance(one, Member)]

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {
            f"m{place}_{name}": network
            for place, member in enumerate(self._made)
            for name, network in member.method.models(build).items()
        }

    def local_round(self, site: Site) -> None:
        raise ConfigError("an average of models is not trained: train its members")

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        found = []
        for place, member in enumerate(self._made):
            prefix = f"m{place}_"
            mine = {key.removeprefix(prefix): models[key] for key in models.keys() if key.startswith(prefix)}  # noqa: SIM118
            found.append(member.method.predict(member.model, nn.ModuleDict(mine), inputs))
        return together(found, Target(self.target))


def averaged(
    members: Mapping[str, tuple[Method, str, nn.ModuleDict]], target: Target
) -> tuple[Averaged, str, nn.ModuleDict]:
    """The average of models, its name, and its networks.

    Args:
        members: deployed name to method, the method's own name of the model, and the networks it predicts with.
    """
    method = Averaged(members=tuple(Member(trained, name) for trained, name, _ in members.values()), target=str(target))
    networks = {
        f"m{place}_{key}": network
        for place, (_, _, mine) in enumerate(members.values())
        for key, network in mine.items()
    }
    return method, next(iter(method.deploys)), nn.ModuleDict(networks)
