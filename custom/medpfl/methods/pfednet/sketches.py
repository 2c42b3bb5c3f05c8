# SPDX-License-Identifier: Apache-2.0
"""What a hospital tells of its data where a graph of similar hospitals is made (``medpfl.core.graph.SKETCHES``).

The share of a class that few patients have tells of these few, and so does the mean of a table's column that is 0 but
for few rows: with the number of samples, which the server knows, either gives their number. What fewer than the
policy's ``least_count`` have is told as what most have.
"""

import logging

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.methods.contract import Site

_log = logging.getLogger(__name__)
_HERE = torch.device("cpu")
"""Where the data lie, and where sums are the same bits at every hospital; to copy them takes longer than to add up."""


def sketch(name: str, site: Site) -> dict[str, Tensor]:
    """A sketch of the training split, in float64.

    Features are the columns of a table and the channels of images, volumes and recordings; every place and time of a
    channel counts alike. Tables, recordings and arrays are standardised at each hospital, which would make them all
    look the same: that is undone.

    Args:
        name: "moments", "labels" or "covariance".
    """
    if name == "labels":
        return {"histogram": _shares(site)}
    mean, covariance = _moments(site)
    return {"mean": mean, "covariance": covariance} if name == "covariance" else {
        "mean": mean, "variance": covariance.diagonal().clone(),
    }  # fmt: skip


def _moments(site: Site) -> tuple[Tensor, Tensor]:
    features = site.data.input_shape[0]
    count, total = 0, torch.zeros(features, dtype=torch.float64)
    products = torch.zeros(features, features, dtype=torch.float64)
    rare, usual = _rare_values(site, features)
    for inputs in site.training_inputs(device=_HERE):
        rows = inputs.movedim(1, -1).reshape(-1, features).double()
        rows = torch.where(rare, usual, rows)
        count += len(rows)
        total += rows.sum(dim=0)
        products += rows.T @ rows
    mean = total / count
    covariance = products / count - torch.outer(mean, mean)
    if site.data.preparation and (fitted := site.data.preparation.standardised()):
        centre, scale = (torch.tensor(values, dtype=torch.float64) for values in fitted)
        mean = mean * scale + centre
        covariance = covariance * torch.outer(scale, scale)
    covariance.diagonal().clamp_(min=0)  # a constant feature's may be rounded to below zero
    return mean, covariance


def _rare_values(site: Site, features: int) -> tuple[Tensor, Tensor]:
    """Of a table: which columns hold two values (a category's are 0 and 1) of which one is rare, and the other one."""
    none = torch.zeros(features, dtype=torch.bool), torch.zeros(features, dtype=torch.float64)
    if len(site.data.input_shape) != 1:
        return none
    rows = torch.cat([inputs.double() for inputs in site.training_inputs(device=_HERE)])
    low, high = rows.aminmax(dim=0)
    lows, highs = (rows == low).sum(dim=0), (rows == high).sum(dim=0)
    least = torch.minimum(lows, highs)
    rare = (lows + highs == len(rows)) & (low < high) & (least < site.least_count)
    if rare.any():
        _log.info("%d columns hold a value that few have; it is told as the other one", int(rare.sum()))
    return rare, torch.where(lows > highs, low, high)


def _shares(site: Site) -> Tensor:
    samples = site.data.splits["train"]
    if not samples.classes:
        raise ConfigError("the sketch 'labels' tells how many cases of each class there are; this task has no classes")
    found = torch.zeros(len(samples.names), samples.classes, dtype=torch.float64)
    for start in range(0, len(samples), 256):
        labels = samples.targets[start : start + 256].long()
        cases = torch.from_numpy(samples.case[start : start + 256]).reshape(-1, *[1] * (labels.ndim - 1))
        places = (cases * samples.classes + labels).flatten()
        found += torch.bincount(places, minlength=found.numel()).reshape(found.shape)
    counts, patients = found.sum(dim=0), (found > 0).sum(dim=0)
    rare = (patients > 0) & (patients < site.least_count)
    most = int(counts.argmax())
    rare[most] = False
    if rare.any():
        _log.info("%d classes that few cases have are told as part of the most frequent one", int(rare.sum()))
    counts[most] += counts[rare].sum()
    counts[rare] = 0
    return counts / counts.sum()
