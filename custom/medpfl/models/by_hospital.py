# SPDX-License-Identifier: Apache-2.0
"""Another network at every hospital."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.auto import Auto
from medpfl.models.contract import Architecture


@dataclass(frozen=True)
class OwnChoice(Architecture):
    """The network that the hospital's site file names, under ``networks`` and the name of the task's dataset. The
    hospital alone knows it: neither the server nor the others are told."""

    @property
    def multiple(self) -> int:
        """Known at the hospital only."""
        return 1

    @property
    def differs(self) -> bool:
        return True

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        raise ConfigError("the job leaves the network to the hospitals, whose site files name it; none is known here")


class ByHospital(Architecture):
    """One argument a hospital: its name, and the architecture it uses; ``default`` is for those that are not named.

    In a job: {"path": "medpfl.models.by_hospital.ByHospital",
               "args": {"berlin": {"path": "medpfl.models.resnet.ResNet"}, "default": {...}}}
    """

    def __init__(self, **hospitals: Architecture):
        for name, given in hospitals.items():
            if not isinstance(given, Architecture) or isinstance(given, ByHospital):
                raise ConfigError(f"ByHospital: '{name}' must be an architecture, got {given!r}")
            if isinstance(given, Auto):
                raise ConfigError(
                    f"ByHospital: '{name}' cannot be Auto, which is planned for all hospitals together; let the task's "
                    "architecture be Auto, or take what 'medpfl plan' writes"
                )
        if not hospitals:
            raise ConfigError("ByHospital needs at least one hospital or 'default'")
        self.hospitals = dict(sorted(hospitals.items()))

    @property
    def multiple(self) -> int | None:
        """Of all hospitals' networks together; None unless all are for segmentation."""
        multiples = [given.multiple for given in self.hospitals.values()]
        known = [multiple for multiple in multiples if multiple is not None]
        return math.lcm(*known) if len(known) == len(multiples) else None

    def multiples(self, axes: int) -> tuple[int, ...] | None:
        each = [given.multiples(axes) for given in self.hospitals.values()]
        known = [lengths for lengths in each if lengths is not None]
        return tuple(math.lcm(*steps) for steps in zip(*known, strict=True)) if len(known) == len(each) else None

    @property
    def fixed(self) -> bool:
        return any(given.fixed for given in self.hospitals.values())

    @property
    def differs(self) -> bool:
        first, *others = self.hospitals.values()
        return first.differs or any(other != first for other in others)

    @property
    def named_hospitals(self) -> Collection[str]:
        return self.hospitals.keys() - {"default"}

    def at(self, site: str) -> Architecture:
        found = self.hospitals.get(site, self.hospitals.get("default"))
        if found is None:
            raise ConfigError(
                f"the job names no network for {site}, nor a default; it names {', '.join(self.hospitals)}"
            )
        return found

    def arguments(self) -> dict[str, Architecture]:
        """For its configuration."""
        return dict(self.hospitals)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        raise ConfigError("ByHospital has a network for each hospital, and none without a hospital's name")

    def __repr__(self) -> str:
        return f"ByHospital({', '.join(f'{name}={given!r}' for name, given in self.hospitals.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByHospital) and self.hospitals == other.hospitals

    def __hash__(self) -> int:
        return hash(repr(self))
