# SPDX-License-Identifier: Apache-2.0
"""Segmentation of regions that overlap, such as a tumour, its core and the enhancing part of the core (BraTS)."""

import re
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.data.preparation import Spec
from medpfl.data.readout import ByRegion
from medpfl.data.samples import SiteData
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import DiceCE
from medpfl.tasks.losses.regions import RegionDiceCE
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.masks import Dice, mask_metrics
from medpfl.tasks.metrics.regions import of_regions
from medpfl.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class RegionSegmentation(Segmentation):
    """As ``Segmentation``, but an output a region with a probability of its own. Predictions are written as labels.

    Args:
        regions: region to the labels (numbers, as the site file declares them) whose union it is.
        written: the label that is written where each region is found; later regions overwrite earlier ones, so the
            regions go from large to small.
        more_metrics: beside dice and dice_REGION, which are always there: hd95, surface_dice, volume_error, of all
            regions or, as hd95_REGION, of one.
    """

    regions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    written: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        regions = {name: tuple(labels) for name, labels in self.regions.items()}
        if not regions or not all(labels and min(labels) > 0 for labels in regions.values()):
            raise ConfigError(
                "RegionSegmentation's regions must name the labels of each region, numbers above 0 (0 is the "
                f"background), got {self.regions}"
            )
        for name in regions:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
                raise ConfigError(
                    "RegionSegmentation: a region's name is small letters, digits and '_', a letter first, got "
                    f"{name!r}"
                )
        object.__setattr__(self, "regions", regions)
        object.__setattr__(self, "written", tuple(self.written))
        outside = [name for name, label in zip(regions, self.written, strict=False) if label not in regions[name]]
        if len(self.written) != len(regions) or outside:
            raise ConfigError(
                "RegionSegmentation's written must be a label of each region in their order, got "
                f"{list(self.written)} for {', '.join(f'{name} {list(labels)}' for name, labels in regions.items())}"
            )
        mine = RegionDiceCE(tuple(regions.values()))
        if self.loss not in (DiceCE(), mine):
            raise ConfigError("RegionSegmentation has the loss of its regions; leave 'loss' out")
        object.__setattr__(self, "loss", mine)
        super().__post_init__()

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        return of_regions((Dice(),), self.regions)

    @property
    def offered(self) -> tuple[Metric, ...]:  # type: ignore[override]
        return of_regions(mask_metrics(self.spacing, self.tolerance), self.regions)

    def metric(self, name: str) -> Metric:
        return Task.metric(self, name)

    @property
    def spec(self) -> Spec:
        return replace(super().spec, readout=ByRegion(self.written))

    def structures(self, classes: int) -> list[tuple[int, ...]]:
        return list(self.regions.values())

    def informed(self, data: SiteData) -> Task:
        largest = max(max(labels) for labels in self.regions.values())
        if largest >= len(data.class_names):
            raise ConfigError(
                f"RegionSegmentation's regions name the label {largest}; the labels here are 1 to "
                f"{len(data.class_names) - 1}, after the background: {', '.join(data.class_names)}"
            )
        return super().informed(data)

    def network(self, data: SiteData) -> nn.Module:
        return self.architecture.build(data.input_shape, len(self.regions))

    def decide(self, outputs: Tensor) -> Tensor:
        """Labels, N x ..., uint8."""
        return ByRegion(self.written).decided(outputs)

    @property
    def reading(self) -> str:
        told = ", ".join(f"{name} (written as {label})" for name, label in zip(self.regions, self.written, strict=True))
        return f"sigmoid of each region's output: {told}; the later overwrites the earlier"
