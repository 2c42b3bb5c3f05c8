# SPDX-License-Identifier: Apache-2.0
"""FedAP's similarity of hospitals: distances of their feature statistics, and the weights made of them.

Lu, Wang, Chen, et al., "Personalized Federated Learning with Adaptive Batchnorm for Healthcare", IEEE Transactions on
Big Data 2022, Eq. (6) to (8).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mixing import Matrix, State

MEAN, VARIANCE = ".mean", ".variance"


def check_statistics(statistics: State) -> None:
    """Every layer has a mean and a variance, with as many values, and no variance is negative.

    Raises:
        ConfigError: naming the entry.
    """
    for key, values in statistics.items():
        layer = key.removesuffix(MEAN).removesuffix(VARIANCE)
        pair = [statistics.get(layer + MEAN), statistics.get(layer + VARIANCE)]
        if layer == key or pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape:
            raise ConfigError(
                f"statistic '{key}': expected '<layer>{MEAN}' and '<layer>{VARIANCE}' with as many values"
            )
        if key.endswith(VARIANCE) and (values < 0).any():
            raise ConfigError(f"statistic '{key}' holds a negative variance")


def distances(statistics: Sequence[State]) -> NDArray[np.float64]:
    """d_ij = sum over layers of sqrt(|mu_i - mu_j|^2 + |sqrt(r_i) - sqrt(r_j)|^2), K x K.  Eq. (6)

    Args:
        statistics: K times ``<layer>.mean`` and ``<layer>.variance`` of every layer, checked.
    """
    layers = [key.removesuffix(MEAN) for entry in statistics[:1] for key in entry if key.endswith(MEAN)]
    result = np.zeros((len(statistics), len(statistics)))
    for layer in layers:
        means = [_values(entry[layer + MEAN]) for entry in statistics]
        variances = [_values(entry[layer + VARIANCE]) for entry in statistics]
        points = np.stack([np.concatenate([m, np.sqrt(v)]) for m, v in zip(means, variances, strict=True)])
        with np.errstate(over="ignore"):  # a hospital that tells numbers beyond all others' is infinitely far
            for row in range(len(points)):  # differences themselves: the Gram trick would cancel for close hospitals
                result[row] += np.sqrt(np.square(points - points[row]).sum(axis=1))
    return result


def _values(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().cpu().double().numpy().reshape(-1)


def inverse_distance_weights(distance: NDArray[np.float64], lam: float) -> Matrix:
    """W = lam I + (1 - lam) w with w_ij proportional to 1 / d_ij and w_ii = 0.  Eq. (7), (8)

    Where hospitals have distance 0, 1 / d has no value: the limit is that they share a row's weight equally and the
    others get none of it. Where all others are infinitely far, they share it equally, too. A lone hospital keeps its
    model, W = [1].

    Args:
        distance: K x K, >= 0, symmetric.
        lam: weight of a hospital's own model, in [0, 1].
    """
    size = len(distance)
    if size == 1:
        return np.ones((1, 1))
    weights = np.zeros((size, size))
    for row in range(size):
        others = np.delete(distance[row], row)
        least = others.min()
        # Relative to the nearest, so that nothing overflows however small the distances are.
        share = least / others if 0 < least < np.inf else (others == least).astype(float)
        weights[row, np.arange(size) != row] = share / share.sum()
    return lam * np.eye(size) + (1 - lam) * weights
