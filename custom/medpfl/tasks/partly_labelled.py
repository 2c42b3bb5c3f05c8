# SPDX-License-Identifier: Apache-2.0
"""Segmentation where some hospitals' label maps show only some of the classes: one outlined the liver, another its
tumours too."""

import dataclasses
from dataclasses import dataclass

from medpfl.core.errors import ConfigError
from medpfl.data.preparation import Spec
from medpfl.data.samples import SiteData
from medpfl.tasks.contract import Task
from medpfl.tasks.losses.marginal import Marginal
from medpfl.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class PartlyLabelled(Segmentation):
    """As ``Segmentation``, with outputs for all classes everywhere.

    Where a hospital's label maps have the background, there may be a class that it does not annotate. So its loss is
    the job's, of the classes that it annotates and of one background, whose probability is the sum of the background's
    and of those of all other classes (marginal loss; Fang and Yan, IEEE TMI 2020; Shi et al., Medical Image Analysis
    2021). Metrics count the hospital's annotated classes alone; a metric of another class is undefined there.
    """

    @property
    def spec(self) -> Spec:
        return dataclasses.replace(super().spec, partly=True)

    def informed(self, data: SiteData) -> Task:
        annotated = data.splits["train"].annotated
        mine = super().informed(data)
        if annotated is None or not isinstance(mine, PartlyLabelled):
            return mine
        if getattr(self.loss, "weights", None) is not None:
            raise ConfigError(
                f"{type(self.loss).__name__}'s weights are of all classes, some of which are not annotated here"
            )
        return dataclasses.replace(mine, loss=Marginal(mine.loss, annotated))
