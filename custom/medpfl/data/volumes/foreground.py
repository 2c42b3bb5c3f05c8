# SPDX-License-Identifier: Apache-2.0
"""What the foreground voxels of a hospital's training volumes are like, for intensities that are fitted on them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.contract import Item
from medpfl.data.intensity import Intensity

_MOST = 10_000_000
"""Voxels of each channel that are taken over all volumes; nnU-Net (version 2) takes ten times as many."""


def fitted(intensity: Intensity, items: Iterable[Item], count: int, source: Path) -> Intensity:
    """The intensities, fitted on the voxels above 0 of every label map as the files have them.

    Every volume gives as many voxels at most, evenly spread over its foreground in the order of memory, so that nothing
    depends on chance.

    Args:
        items: the training cases, as read; ``count``: how many there are.
        source: for messages.

    Raises:
        DataError: there is no foreground, or the volumes differ in channels.
    """
    most = max(1, _MOST // max(count, 1))
    found: list[NDArray[Any]] = []
    for item in items:
        assert isinstance(item.target, np.ndarray)
        voxels = item.image[:, item.target > 0]
        if voxels.shape[1] > most:
            voxels = voxels[:, np.linspace(0, voxels.shape[1] - 1, most).round().astype(np.int64)]
        found.append(voxels)
    if len({len(voxels) for voxels in found}) > 1:
        raise DataError(f"{source}: expected images of one number of channels, got {sorted({len(v) for v in found})}")
    together = np.concatenate(found, axis=1)
    if not together.shape[1]:
        raise DataError(f"{source}: no training volume has foreground, on which the intensities are to be fitted")
    return intensity.fitted(list(together))
