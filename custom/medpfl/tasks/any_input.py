# SPDX-License-Identifier: Apache-2.0
"""What tasks share that learn from rows of tables, windows of recordings and images alike: which network, and how
images are shown to it."""

import itertools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from medpfl.augment.listed import Given, built
from medpfl.core.errors import ConfigError, DataError
from medpfl.data.preparation import Spec
from medpfl.data.samples import SiteData
from medpfl.data.target import Target
from medpfl.models.contract import Architecture
from medpfl.models.conv1d import Conv1d
from medpfl.models.resnet import ResNet
from medpfl.tasks.augmenting import AugmentsInputs
from medpfl.tasks.contract import Task
from medpfl.tasks.flips import check_flips, flipped


def perceptron(features: int, hidden: tuple[int, ...], outputs: int) -> nn.Module:
    """Linear layers with ReLU between them; without hidden ones a linear model."""
    widths = [features, *hidden]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


@dataclass(frozen=True, kw_only=True)
class AnyInput(AugmentsInputs):
    """Rows, windows or images; which of them the site file's dataset says.

    Args:
        dataset: name of a declared dataset of kind ``table``, ``series``, ``images`` or ``arrays``.
        size: of images: height and width in pixels to which each is brought (of arrays of volumes their own depth,
            height and width). Empty: rows or windows are learnt from.
        architecture: the network; without one rows get a perceptron, windows ``Conv1d`` and images ``ResNet``.
        hidden: of the perceptron: widths of hidden layers (each followed by ReLU).
        augment: how training images are changed at random, one after another, or the name of a preset.
        flips: axes along which images are mirrored, too, when a model is tested or predicts; the mean of the outputs
            counts.
    """

    dataset: str
    size: tuple[int, ...] = ()
    architecture: Architecture | None = None
    hidden: tuple[int, ...] = ()
    augment: Given = ()
    flips: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = type(self).__name__
        for key in ("size", "hidden"):
            object.__setattr__(self, key, tuple(getattr(self, key)))  # JSON has lists
            if any(length < 1 for length in getattr(self, key)):
                raise ConfigError(f"{kind}'s {key} must be numbers of at least 1, got {list(getattr(self, key))}")
        if self.size and len(self.size) not in (2, 3):
            raise ConfigError(f"{kind}'s size must be 2 or 3 lengths, or empty for rows, got {list(self.size)}")
        if self.hidden and (self.architecture is not None or self.size):
            raise ConfigError(f"{kind}: 'hidden' is of the perceptron of rows; leave it out")
        if not self.size and (self.augment or self.flips):
            raise ConfigError(f"{kind}: 'augment' and 'flips' are of images, which need a 'size'")
        object.__setattr__(self, "augment", built(self.augment, f"{kind}.augment", self.size))
        check_flips(self.flips, len(self.size), kind)

    @property
    @abstractmethod
    def target(self) -> Target:
        """What the answer to a case is."""

    @property
    def spec(self) -> Spec:
        return Spec(self.target, ("images",) if self.size else ("rows", "windows"), self.size)

    def informed(self, data: SiteData) -> Task:
        """Refuse data in another unit than the job's, in which results are told and a survival's horizons are."""
        mine, theirs = getattr(self, "unit", ""), data.preparation.answer_unit() if data.preparation else ""
        if mine and theirs and mine != theirs:
            said = f"the job's unit of what is predicted is '{mine}', and the site file"
            raise DataError(
                f"{said} ('units') says '{theirs}' of it: its numbers, or its horizons, would be taken for others",
                public=f"{said} says another one of it",
            )
        return super().informed(data)

    def outputs(self, data: SiteData) -> int:
        """Number of the network's outputs."""
        return 1

    def network(self, data: SiteData) -> nn.Module:
        shape, outputs = data.input_shape, self.outputs(data)
        if self.architecture is not None:
            return self.architecture.build(shape, outputs)
        if len(shape) == 1:
            return perceptron(shape[0], self.hidden, outputs)
        if self.hidden:
            raise ConfigError(f"{type(self).__name__}: 'hidden' is of the perceptron of rows; the data are windows")
        return (ResNet() if self.size else Conv1d()).build(shape, outputs)

    def infer(self, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        return flipped(forward, inputs, self.flips, back=False)
