# SPDX-License-Identifier: Apache-2.0
"""Classification of table rows, scored by accuracy, balanced accuracy and AUC."""

from dataclasses import dataclass

from torch import nn

from medpfl.augment.listed import Given, built
from medpfl.core.errors import ConfigError
from medpfl.data.preparation import Spec
from medpfl.data.samples import SiteData
from medpfl.data.target import Target
from medpfl.models.contract import Architecture
from medpfl.tasks.any_input import perceptron
from medpfl.tasks.augmenting import AugmentsInputs
from medpfl.tasks.labelled import Labelled


@dataclass(frozen=True)
class Tabular(AugmentsInputs, Labelled):
    """A multilayer perceptron (without hidden layers, logistic regression) or a given network.

    Args:
        dataset: name of a declared dataset of kind ``table``.
        hidden: widths of hidden layers (each followed by ReLU).
        architecture: the network, in place of the perceptron.
        score: metric that chooses the best round.
        loss: what training descends; ``sampling``: whether its steps draw rare classes more often (``Labelled``);
            ``more_metrics``: by which further ones models are tested.
        augment: how training samples are changed at random, one after another: components of ``augment.values``.
    """

    dataset: str
    hidden: tuple[int, ...] = ()
    architecture: Architecture | None = None
    score: str = "accuracy"
    augment: Given = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON has lists
        object.__setattr__(self, "augment", built(self.augment, "Tabular.augment", ()))
        if any(width < 1 for width in self.hidden):
            raise ConfigError(f"Tabular's hidden widths must be at least 1, got {list(self.hidden)}")
        if self.hidden and self.architecture is not None:
            raise ConfigError("Tabular: 'hidden' is of the perceptron; leave it out where there is an 'architecture'")

    @property
    def spec(self) -> Spec:
        return Spec(Target.CLASS, ("rows",))

    def network(self, data: SiteData) -> nn.Module:
        outputs = self.outputs(data.class_names)
        if self.architecture is not None:
            return self.architecture.build(data.input_shape, outputs)
        return perceptron(data.input_shape[0], self.hidden, outputs)
