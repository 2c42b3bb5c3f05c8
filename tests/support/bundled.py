# SPDX-License-Identifier: Apache-2.0
"""What MONAI's bundles do to an image's intensities."""

from typing import Any

from torch import Tensor

from medpfl.data.intensity import Intensity


def as_in_bundles(intensity: Intensity, image: Tensor) -> Tensor:
    """An image, C x ..., by the transforms that a bundle names."""
    import monai.transforms

    content: Any = {"image": image.clone()}
    for step in intensity.as_monai():
        name = str(step.pop("_target_"))
        content = getattr(monai.transforms, name)(keys="image", **step)(content)
    found: Tensor = content["image"]
    return found
