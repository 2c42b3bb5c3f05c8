# SPDX-License-Identifier: Apache-2.0
"""What a hospital tells of its data where a graph of similar hospitals is made (``medpfl.core.graph.SKETCHES``)."""

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.methods.base import Site


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
    for inputs in site.training_inputs():
        rows = inputs.movedim(1, -1).reshape(-1, features).double().cpu()
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


def _shares(site: Site) -> Tensor:
    samples = site.data.splits["train"]
    if not samples.classes:
        raise ConfigError("the sketch 'labels' tells how many cases of each class there are; this task has no classes")
    counts = torch.zeros(samples.classes, dtype=torch.float64)
    for start in range(0, len(samples), 256):
        labels = samples.targets[start : start + 256].flatten().long()
        counts += torch.bincount(labels, minlength=samples.classes).double()
    return counts / counts.sum()
