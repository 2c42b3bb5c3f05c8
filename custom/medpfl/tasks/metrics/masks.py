# SPDX-License-Identifier: Apache-2.0
"""Metrics of segmentations: a class index for every pixel or voxel.

Of every case the mean over the declared foreground classes, or the value of one of them. None is undefined, but of
classes that a hospital does not annotate: where a class is in neither the label map nor the decision, nothing was to be
found and nothing was, which is the best value; where it is in one of them only, it is the worst that the case allows.
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Self

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.data.readout import UNDECIDED
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import listed
from medpfl.tasks.metrics.contract import CaseMetric
from medpfl.tasks.metrics.measure import Direction, Measure

Spacing = tuple[float, float, float]


class MaskMetric(CaseMetric):
    """A metric of each image or volume (its slices taken together), by foreground class. NaN where an output is none.

    Args:
        number: of the only class that counts, in the declared order, where 0 is the background; None: the mean over
            all but the background.
    """

    def __init__(self, number: int | None = None):
        self.number = number
        if number is not None:
            self.name = f"{self.name}_{number}"

    @property
    def measure(self) -> Measure:
        return super().measure.model_copy(update={"class_number": self.number})

    @abstractmethod
    def of_class(self, number: int) -> Self:
        """The metric of one class."""

    @abstractmethod
    def by_class(self, found: Tensor, truth: Tensor, classes: int) -> list[float]:
        """Of one case the value of each foreground class.

        Args:
            found, truth: H x W x D class indices, D = 1 for an image.
        """

    def suits(self, data: SiteData) -> None:
        if self.number is not None and not 0 < self.number < len(data.class_names):
            raise ConfigError(
                f"the metric '{self.name}' is of the class with the number {self.number}; the numbers here are 1 to "
                f"{len(data.class_names) - 1}, after the background: {listed(data.class_names)}"
            )

    def of_cases(self, decisions: Tensor, samples: Samples) -> list[float]:
        values = []
        for found, truth in samples.masks(decisions):
            if bool((found == UNDECIDED).any()):
                values.append(math.nan)
                continue
            each = self.by_class(found.long(), truth.long(), samples.classes)
            if samples.annotated is not None:  # of what the label map does not show nothing can be said
                each = [value if k in samples.annotated else math.nan for k, value in enumerate(each, start=1)]
            known = torch.tensor(each, dtype=torch.float64)
            mean = float(known[~known.isnan()].mean())
            values.append(mean if self.number is None else each[self.number - 1])
        return values


class Dice(MaskMetric):
    """Dice; 1 where a class is nowhere, 0 where it is only in one of decision and label map. Images count at the task's
    size."""

    name = "dice"
    range = (0.0, 1.0)

    def of_class(self, number: int) -> Self:
        return type(self)(number)

    def by_class(self, found: Tensor, truth: Tensor, classes: int) -> list[float]:
        from monai.metrics import compute_dice
        from monai.networks import one_hot

        one, other = (one_hot(labels[None, None], classes) for labels in (found, truth))
        dice = compute_dice(one, other, include_background=False, ignore_empty=False)
        each: list[float] = dice.double()[0].tolist()
        return each


class InSpace(MaskMetric):
    """A metric of distances or volumes, for which a voxel needs a size.

    Args:
        spacing: that size in mm, along H, W and D.
    """

    direction: ClassVar[Direction] = "lower"

    def __init__(self, spacing: Spacing, number: int | None = None):
        super().__init__(number)
        self.spacing = spacing

    def of_class(self, number: int) -> Self:
        return type(self)(self.spacing, number)

    def suits(self, data: SiteData) -> None:
        super().suits(data)
        if data.preparation is not None and data.preparation.form != "volumes":
            raise ConfigError(
                f"the metric '{self.name}' is measured in mm, and the pixels of the dataset's {data.preparation.form} "
                "have no size in mm"
            )

    @abstractmethod
    def of_masks(self, found: Tensor, truth: Tensor) -> float:
        """The value of one class of one case; both masks are H x W x D bool."""

    def by_class(self, found: Tensor, truth: Tensor, classes: int) -> list[float]:
        return [self.of_masks(found == number, truth == number) for number in range(1, classes)]

    def _flat(self, *masks: Tensor) -> tuple[list[Tensor], list[float]]:
        """As MONAI has them, 1 x 1 x H x W x D, and the spacing; without the axis along which there is one slice, be it
        axial, sagittal or coronal: every voxel of it would lie on the surface."""
        lengths, spacing = list(masks[0].shape), list(self.spacing)
        if 1 in lengths:
            axis = 2 - lengths[::-1].index(1)
            del spacing[axis]
            masks = tuple(mask.squeeze(axis) for mask in masks)
        return [mask[None, None] for mask in masks], spacing


class HD95(InSpace):
    """95th percentile of the distances between the surfaces, the larger of the two directions, in mm; 0 where a class
    is nowhere, the case's diagonal where it is only in one of decision and label map."""

    name = "hd95"
    unit = "mm"
    range = (0.0, math.inf)

    def of_masks(self, found: Tensor, truth: Tensor) -> float:
        if not found.any() and not truth.any():
            return 0.0
        if not found.any() or not truth.any():
            return math.dist([0.0] * 3, [n * mm for n, mm in zip(found.shape, self.spacing, strict=True)])
        from monai.metrics import compute_hausdorff_distance

        (one, other), spacing = self._flat(found, truth)
        with _quiet():
            distance = compute_hausdorff_distance(one, other, include_background=True, percentile=95, spacing=spacing)
        return float(distance)


class SurfaceDice(InSpace):
    """Normalised surface Dice (Nikolov et al., 2018): the share of both surfaces that lies within a tolerance of the
    other; 1 where a class is nowhere, 0 where it is only in one of decision and label map.

    Args:
        tolerance: in mm, >= 0.
    """

    name = "surface_dice"
    direction: ClassVar[Direction] = "higher"
    range = (0.0, 1.0)

    def __init__(self, spacing: Spacing, tolerance: float, number: int | None = None):
        super().__init__(spacing, number)
        self.tolerance = tolerance

    def of_class(self, number: int) -> Self:
        return type(self)(self.spacing, self.tolerance, number)

    def of_masks(self, found: Tensor, truth: Tensor) -> float:
        if not found.any() or not truth.any():
            return float(not found.any() and not truth.any())
        from monai.metrics import compute_surface_dice

        (one, other), spacing = self._flat(found, truth)
        with _quiet():
            share = compute_surface_dice(one, other, [self.tolerance], include_background=True, spacing=spacing)
        return float(share)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without one warning, which MONAI raises at an argument of its own for every class of every case."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*`always_return_as_numpy`", FutureWarning)
        yield


class VolumeError(InSpace):
    """Distance of the volume that was found from the one that was there, in ml, whether too large or too small."""

    name = "volume_error"
    unit = "ml"
    range = (0.0, math.inf)

    def of_masks(self, found: Tensor, truth: Tensor) -> float:
        return abs(int(found.sum()) - int(truth.sum())) * math.prod(self.spacing) / 1000


def mask_metrics(spacing: Spacing, tolerance: float) -> tuple[MaskMetric, ...]:
    """What segmentations can be scored by beside Dice; arguments as in ``SurfaceDice``."""
    return HD95(spacing), SurfaceDice(spacing, tolerance), VolumeError(spacing)


def of_one_class(name: str, metrics: Sequence[MaskMetric]) -> MaskMetric | None:
    """The metric that a name such as "hd95_2" means; None where it is no such name."""
    kind, _, number = name.rpartition("_")
    known = next((one for one in metrics if one.name == kind), None)
    # "01" would be called "dice_1", under which nobody looks for the score "dice_01".
    plain = number.isdecimal() and len(number) < 6 and number == str(int(number))
    return known.of_class(int(number)) if known is not None and plain else None
