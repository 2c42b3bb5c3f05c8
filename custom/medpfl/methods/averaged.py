# SPDX-License-Identifier: Apache-2.0
"""Several models that a job left at a hospital, as one: the mean of their probabilities predicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import JsonValue
from torch import Tensor, nn

from medpfl.component import build
from medpfl.core.errors import ConfigError
from medpfl.data.target import Target
from medpfl.methods.contract import Build, Method, Site
from medpfl.tasks.together import together


@dataclass(frozen=True, kw_only=True)
class Averaged(Method):
    """It is not trained: it is put together from models that were.

    Args:
        members: of each model, at least two, the method that trained it; its networks are called "m<place>_<network>".
        names: of each model the method's own name of it.
        target: what the answer to a case is, as the models' task says, and of overlapping regions "labels"
            (``averaged_as``); it decides what is averaged (``together``).
    """

    members: tuple[Method | Mapping[str, JsonValue], ...]
    names: tuple[str, ...]
    target: Literal["class", "mask", "labels", "value", "survival"]

    deploys: ClassVar = {"average": "m0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        made = tuple(one if isinstance(one, Method) else build(one, Method, "a member") for one in self.members)
        object.__setattr__(self, "members", made)
        if len(made) < 2 or len(made) != len(self.names):
            raise ConfigError(
                f"Averaged takes at least 2 models and their names, got {len(made)} and {len(self.names)}"
            )
        for method, name in zip(made, self.names, strict=True):
            if name not in method.deploys:
                known = ", ".join(method.deploys)
                raise ConfigError(f"{type(method).__name__} deploys no model '{name}'; it deploys: {known}")

    @property
    def _methods(self) -> list[Method]:
        return [one for one in self.members if isinstance(one, Method)]

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {
            f"m{place}_{name}": network
            for place, method in enumerate(self._methods)
            for name, network in method.models(build).items()
        }

    def local_round(self, site: Site) -> None:
        raise ConfigError("an average of models is not trained: train its members")

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        found = []
        for place, (method, own) in enumerate(zip(self._methods, self.names, strict=True)):
            prefix = f"m{place}_"
            mine = {key.removeprefix(prefix): models[key] for key in models.keys() if key.startswith(prefix)}  # noqa: SIM118
            found.append(method.predict(own, nn.ModuleDict(mine), inputs))
        return together(found, Target(self.target))


def averaged(
    members: Mapping[str, tuple[Method, str, nn.ModuleDict]], target: Target
) -> tuple[Averaged, str, nn.ModuleDict]:
    """The average of models, its name, and its networks.

    Args:
        members: deployed name to method, the method's own name of the model, and the networks it predicts with.
        target: ``averaged_as`` of their task's spec.
    """
    method = Averaged(
        members=tuple(trained for trained, _, _ in members.values()),
        names=tuple(name for _, name, _ in members.values()),
        target=target.value,
    )
    networks = {
        f"m{place}_{key}": network
        for place, (_, _, mine) in enumerate(members.values())
        for key, network in mine.items()
    }
    return method, next(iter(method.deploys)), nn.ModuleDict(networks)
