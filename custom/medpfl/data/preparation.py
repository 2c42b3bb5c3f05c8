# SPDX-License-Identifier: Apache-2.0
"""What a task wants of cases, how they were prepared for it, and new cases that are prepared alike."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import JsonValue, model_validator

from medpfl.core.errors import ConfigError, DataError
from medpfl.data.declared import Strict
from medpfl.data.intensity import Intensity, ZScore
from medpfl.data.readout import ByClass, Readout
from medpfl.data.target import Target
from medpfl.data.untrusted import MOST_PREPARED

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, str | float]
"""A row of a table that is written: column to value."""


@dataclass(frozen=True)
class Spec:
    """What a task wants of a dataset.

    Attributes:
        target: what the answer to a case is.
        forms: of which forms the samples may be: "rows", "windows", "images" or "volumes".
        size: lengths in pixels (or voxels) to which images are brought, without the channels.
            Of volumes, two lengths mean axial slices of this size, three whole volumes of any size, of which networks
            see patches of this one.
        patches: of two lengths: images and slices stay as large as they are, and networks see patches of ``size``.
        spacing: of volumes: voxel size in mm to which each is resampled.
        multiple: what the lengths of whole slices must be multiples of.
        intensity: of volumes: how their intensities are brought into a range.
        readout: how classes follow from the outputs of a network that segments.
        partly: whether label maps may show only some of the classes.
    """

    target: Target
    forms: tuple[str, ...]
    size: tuple[int, ...] = ()
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)
    multiple: int = 1
    intensity: Intensity = ZScore()  # noqa: RUF009 (it is frozen)
    readout: Readout = ByClass()  # noqa: RUF009 (it is frozen)
    partly: bool = False
    patches: bool = False

    def __post_init__(self) -> None:
        if self.target not in tuple(Target):
            raise ConfigError(f"a task's target must be one of {', '.join(Target)}, got '{self.target}'")
        object.__setattr__(self, "target", Target(self.target))
        if math.prod(self.size) > MOST_PREPARED:
            lengths = " x ".join(map(str, self.size))
            raise ConfigError(f"the task's 'size' of {lengths} has more than {MOST_PREPARED} values, for every input")

    @property
    def whole(self) -> bool:
        """Whether cases stay as large as they are, and networks see patches."""
        return self.target is Target.MASK and (self.patches or len(self.size) == 3)

    def plane(self) -> tuple[int, int]:
        """Height and width.

        Raises:
            DataError: the task's size has other axes.
        """
        if len(self.size) != 2:
            sentence = f"the task's size {list(self.size)} does not fit images, which have height and width"
            raise DataError(sentence, public=sentence)
        return self.size[0], self.size[1]

    def lengths(self) -> tuple[int, int, int]:
        """Of a volume that is brought to one size.

        Raises:
            DataError: the task's size has other axes.
        """
        if len(self.size) != 3:
            sentence = f"the task's size {list(self.size)} does not fit volumes, which have three lengths"
            raise DataError(sentence, public=sentence)
        return self.size[0], self.size[1], self.size[2]


@dataclass(frozen=True)
class NewCase:
    """A case to predict.

    Attributes:
        name: its file (and row).
        inputs: N x ... samples, prepared as in training; several for slices of a volume or windows of a recording.
        save: writes a segmentation from the network's outputs (N x C x ...) into a folder, in the input's geometry, on
            request with probabilities, and returns what to tell about it; None where the answer is no mask.
        as_dicom: writes what ``save`` wrote, a file of the same folder, as a DICOM segmentation beside it, with the
            classes' names, and returns the new file's name; None where the input is no DICOM.
    """

    name: str
    inputs: Tensor
    save: Callable[[Tensor, Path, list[str], bool], Row] | None = None
    as_dicom: Callable[[Path, list[str]], str] | None = None


class Preparation(Strict, ABC):
    """What was fitted on (or declared of) the training data to prepare inputs: the means of a table, the channels of
    images. It is kept with the deployed model, as JSON; each kind of dataset has a subclass.

    Attributes:
        kind: name of the kind of dataset.
        form: the form of its samples, as in ``Spec``.
    """

    form: ClassVar[str]
    kind: str

    @model_validator(mode="after")
    def _of_each_a_mean_and_a_scale(self) -> Self:
        mean, scale = self.standardised() or ([], [])
        if len(mean) != len(scale) or not all(map(math.isfinite, [*mean, *scale])) or 0 in scale:
            raise ValueError("expected a mean of each feature or channel, and a scale that is not 0")
        return self

    @abstractmethod
    def new_cases(self, path: Path, spec: Spec) -> Iterator[NewCase]:
        """Cases that no site file declares, from a file or folder, prepared as the training data were.

        Raises:
            DataError: a file cannot be read, with the file, expected and got.
        """

    def spec_with(self, spec: Spec) -> Spec:
        """What a task wants, with what was fitted here.

        Raises:
            DataError: something should have been fitted, and was not.
        """
        return spec

    def shared(self) -> dict[str, JsonValue]:
        """The part that tells nothing of the hospital's data; it goes into models that leave the hospital."""
        return {}

    def meaning(self) -> list[str]:
        """What the entries of an input mean, in their order: a table's features, the channels of recordings. Hospitals
        train together only where they say the same. Empty: the files do not say."""
        return []

    def answer_unit(self) -> str:
        """Of the number or the time to predict; "" where none is declared."""
        return ""

    def standardised(self) -> tuple[list[float], list[float]] | None:
        """Mean and scale of each feature or channel that were fitted here; None where inputs have a fixed range."""
        return None

    def categories(self) -> list[list[int]]:
        """Of each feature with categories the places of its columns, which are 1 where a case has the category and else
        0, before they are standardised. The first category has none."""
        return []
