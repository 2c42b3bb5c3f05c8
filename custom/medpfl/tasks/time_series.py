# SPDX-License-Identifier: Apache-2.0
"""Classification of windows of time series, scored by accuracy, balanced accuracy and AUC."""

from dataclasses import dataclass, field

from torch import nn

from medpfl.augment.listed import Given, built
from medpfl.data.preparation import Spec
from medpfl.data.samples import SiteData
from medpfl.data.target import Target
from medpfl.models.contract import Architecture
from medpfl.models.conv1d import Conv1d
from medpfl.tasks.augmenting import AugmentsInputs
from medpfl.tasks.labelled import Labelled


@dataclass(frozen=True)
class TimeSeries(AugmentsInputs, Labelled):
    """A convolutional network on windows, each a case of its own.

    Args:
        dataset: name of a declared dataset of kind ``series``.
        architecture: the network, for inputs of channels x length.
        score: metric that chooses the best round.
        loss: what training descends; ``sampling``: whether its steps draw rare classes more often (``Labelled``);
            ``more_metrics``: by which further ones models are tested.
        augment: how training samples are changed at random, one after another: components of ``augment.values``.
    """

    dataset: str
    architecture: Architecture = field(default_factory=Conv1d)
    score: str = "accuracy"
    augment: Given = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "augment", built(self.augment, "TimeSeries.augment", (1,)))

    @property
    def spec(self) -> Spec:
        return Spec(Target.CLASS, ("windows",))

    def network(self, data: SiteData) -> nn.Module:
        shape = data.input_shape
        return self.architecture.build(shape, self.outputs(data.class_names))
