# SPDX-License-Identifier: Apache-2.0
"""What a hospital's volumes are like, in a few numbers; and the plan of a network that a server makes of them."""

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from medpfl.data.declared import Strict

Spacing = Annotated[float, Field(ge=0.01, le=100)]
Voxels = Annotated[float, Field(ge=1, le=2**16)]
Stride = Annotated[int, Field(ge=1, le=4)]
Kernel = Annotated[int, Field(ge=1, le=7)]
Side = Annotated[int, Field(ge=1, le=4096)]
_LONGEST = 10_000.0
"""Millimetres of a volume's longest edge. Another hospital's file may say anything, and a plan takes time by it."""


class Fingerprint(Strict):
    """Of the training volumes, in RAS (right-left, posterior-anterior, axial).

    Attributes:
        cases: how many there are.
        channels: of an image.
        classes: background included.
        spacing: median distance of voxels, mm.
        fine: tenth percentile of the same.
        shape: median number of voxels.
    """

    cases: Annotated[int, Field(ge=1, le=1_000_000)]
    channels: Annotated[int, Field(ge=1, le=1000)]
    classes: Annotated[int, Field(ge=2, le=256)]
    spacing: tuple[Spacing, Spacing, Spacing]
    fine: tuple[Spacing, Spacing, Spacing]
    shape: tuple[Voxels, Voxels, Voxels]

    @model_validator(mode="after")
    def _is_of_a_patient(self) -> Self:
        edge = max(voxels * length for voxels, length in zip(self.shape, self.spacing, strict=True))
        if edge > _LONGEST:
            raise ValueError(f"volumes of {edge:.0f} mm; at most {_LONGEST:.0f} mm are planned for")
        return self


class Planned(Strict):
    """What a server tells all hospitals of the network that it planned: ``tasks.planning.Plan``, bounded."""

    spacing: tuple[Spacing, Spacing, Spacing]
    size: tuple[Side, Side, Side]
    batch_size: Annotated[PositiveInt, Field(le=100_000)]
    strides: Annotated[tuple[tuple[Stride, Stride, Stride], ...], Field(min_length=2, max_length=20)]
    kernels: Annotated[tuple[tuple[Kernel, Kernel, Kernel], ...], Field(min_length=3, max_length=21)]
