# SPDX-License-Identifier: Apache-2.0
"""Several networks' outputs as one, whose decision is the mean of theirs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from medpfl.data.preparation import Spec
from medpfl.data.target import Target


def averaged_as(spec: Spec) -> Target:
    """What decides how outputs for such a task are averaged: its target, and of regions that overlap, which have a
    probability each, what labels have."""
    return spec.target if spec.readout.exclusive else Target.LABELS


def together(outputs: Sequence[Tensor], target: Target, weights: Tensor | None = None) -> Tensor:
    """Outputs, B x C x ..., whose probabilities are the mean of the networks' probabilities; of numbers (and
    logarithms of hazard ratios), B x ..., the mean itself.

    One output a sample, and labels, are probabilities by their sigmoid, several classes by their softmax over axis 1:
    the result is log(p / (1 - p)), or log(p), of the mean p, which the sigmoid, or the softmax, makes p again.

    Args:
        outputs: of each network, all of one shape.
        target: ``averaged_as`` of the task's spec.
        weights: of a weighted mean, one a network, >= 0, with the sum 1; None: the plain one.
    """
    stacked = torch.stack([one.float() for one in outputs])
    if weights is not None:
        return _weighted(stacked, target, weights.reshape(-1, *(1 for _ in stacked.shape[1:])))
    if target in (Target.VALUE, Target.SURVIVAL):
        return stacked.mean(dim=0)
    if target is Target.LABELS or stacked.shape[2] == 1:
        positive = torch.nn.functional.logsigmoid(stacked).logsumexp(dim=0)
        return positive - torch.nn.functional.logsigmoid(-stacked).logsumexp(dim=0)
    return stacked.log_softmax(dim=2).logsumexp(dim=0) - math.log(len(outputs))


def _weighted(stacked: Tensor, target: Target, weights: Tensor) -> Tensor:
    stacked = stacked.where(weights > 0, 0.0)  # else NaN of a network that broke would count where it has no share
    if target in (Target.VALUE, Target.SURVIVAL):
        return (weights * stacked).sum(dim=0)
    log = weights.log()  # of 0: -inf, which takes no part in the sums
    if target is Target.LABELS or stacked.shape[2] == 1:
        positive = (log + torch.nn.functional.logsigmoid(stacked)).logsumexp(dim=0)
        return positive - (log + torch.nn.functional.logsigmoid(-stacked)).logsumexp(dim=0)
    return (log + stacked.log_softmax(dim=2)).logsumexp(dim=0)
