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
    parts = (inputs.movedim(1, -1).reshape(-1, features).double() for inputs in site.training_inputs(device=_HERE))
    for rows in parts if len(site.data.input_shape) > 1 else _without_rare(list(parts), site):
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


def _without_rare(parts: list[Tensor], site: Site) -> tuple[Tensor, ...]:
    """A table's rows without what few of them have: rows with a rare category are as those with the most frequent one,
    and where a column of numbers holds two values of which one is rare, it holds the other one."""
    rows = torch.cat(parts)
    _replace_rare_categories(rows, site)
    low, high = rows.aminmax(dim=0)
    lows, highs = (rows == low).sum(dim=0), (rows == high).sum(dim=0)
    least = torch.minimum(lows, highs)
    rare = (lows + highs == len(rows)) & (low < high) & (least < site.least_count)
    if rare.any():
        _log.info("%d columns hold a value that few have; it is told as the other one", int(rare.sum()))
    rows = torch.where(rare, torch.where(lows > highs, low, high), rows)
    return torch.split(rows, [len(part) for part in parts])


def _replace_rare_categories(rows: Tensor, site: Site) -> None:
    """It is not enough to look at each column: of more than two categories, what the others' shares leave of 1 is the
    share of the first, which has no column."""
    if site.data.preparation is None or not (fitted := site.data.preparation.standardised()):
        return
    centre, scale = (torch.tensor(values, dtype=torch.float64) for values in fitted)
    for columns in site.data.preparation.categories():
        held = rows[:, columns] * scale[columns] + centre[columns] > 0.5
        places = torch.where(held.any(dim=1), held.int().argmax(dim=1) + 1, 0)
        counts = torch.bincount(places, minlength=len(columns) + 1)
        most = int(counts.argmax())
        rare = (counts > 0) & (counts < site.least_count)
        rare[most] = False
        if rare.any():
            _log.info("%d categories that few have are told as the most frequent one", int(rare.sum()))
        usual = rows[int((places == most).nonzero()[0])]
        for column in columns:
            rows[rare[places], column] = usual[column].clone()


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
