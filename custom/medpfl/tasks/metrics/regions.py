# SPDX-License-Identifier: Apache-2.0
"""Metrics of regions that overlap, each the union of some labels."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from torch import Tensor

from medpfl.data.samples import SiteData
from medpfl.tasks.losses.regions import inside
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.masks import MaskMetric
from medpfl.tasks.metrics.measure import Measure


class OfRegions(MaskMetric):
    """A metric of masks, of regions in place of labels.

    Args:
        metric: of one class against the rest.
        regions: region to its labels.
        region: the only one that counts; None: the mean over all.
    """

    label: ClassVar[str] = ""

    def __init__(self, metric: MaskMetric, regions: Mapping[str, Sequence[int]], region: str | None = None):
        super().__init__(None)
        self._metric, self._regions = metric, dict(regions) if region is None else {region: regions[region]}
        self.name = f"{metric.name}_{region}" if region else metric.name
        self.range = metric.range  # type: ignore[misc]

    @property
    def measure(self) -> Measure:
        return self._metric.measure

    def suits(self, data: SiteData) -> None:
        self._metric.suits(data)

    def of_class(self, number: int) -> Self:
        return self

    def by_class(self, found: Tensor, truth: Tensor, classes: int) -> list[float]:
        """Of one case the value of each region."""
        one, other = (inside(labels[None], list(self._regions.values()))[0].long() for labels in (found, truth))
        return [self._metric.by_class(a, b, 2)[0] for a, b in zip(one, other, strict=True)]


def of_regions(metrics: Sequence[MaskMetric], regions: Mapping[str, Sequence[int]]) -> tuple[Metric, ...]:
    """Of each metric the mean over the regions, and each region by its name: dice, dice_core."""
    return tuple(OfRegions(one, regions, region) for one in metrics for region in (None, *regions))
