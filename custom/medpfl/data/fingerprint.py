# SPDX-License-Identifier: Apache-2.0
"""What a hospital's volumes are like, in a few numbers; and the plan of a network that a server makes of them."""

from typing import Annotated

from pydantic import Field, PositiveInt

from medpfl.data.declared import Strict

Length = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]
Triple = tuple[Length, Length, Length]
Stride = Annotated[int, Field(ge=1, le=4)]
Kernel = Annotated[int, Field(ge=1, le=7)]
Side = Annotated[int, Field(ge=1, le=4096)]


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

    cases: Annotated[PositiveInt, Field(le=10_000_000)]
    channels: Annotated[PositiveInt, Field(le=1000)]
    classes: Annotated[int, Field(ge=2, le=10_000)]
    spacing: Triple
    fine: Triple
    shape: Triple


class Planned(Strict):
    """What a server tells all hospitals of the network that it planned: ``tasks.planning.Plan``, bounded."""

    spacing: Triple
    size: tuple[Side, Side, Side]
    batch_size: Annotated[PositiveInt, Field(le=100_000)]
    strides: Annotated[tuple[tuple[Stride, Stride, Stride], ...], Field(min_length=2, max_length=20)]
    kernels: Annotated[tuple[tuple[Kernel, Kernel, Kernel], ...], Field(min_length=3, max_length=21)]
