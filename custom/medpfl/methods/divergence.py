# SPDX-License-Identifier: Apache-2.0
"""How far a network's class probabilities are from those it shall learn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medpfl.models.outputs import check_outputs


def largest(outputs: Tensor | Sequence[Tensor]) -> Tensor:
    """Of a network with deep supervision the map of the input's size; of others what they give.

    Raises:
        ConfigError: it is nothing that a network may give.
    """
    check_outputs(outputs, several=True)
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def class_logits(outputs: Tensor | Sequence[Tensor]) -> Tensor:
    """A network's outputs as logits of all classes, B x C x ..., C >= 2: one output is a sigmoid's. float32."""
    outputs = largest(outputs).float()
    return torch.cat([torch.zeros_like(outputs), outputs], dim=1) if outputs.shape[1] == 1 else outputs


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student), averaged over samples (and positions): ``teacher`` are probabilities, ``student`` logits,
    both B x C x .... Of a class with probability 0 nothing is added."""
    return (torch.xlogy(teacher, teacher) - teacher * student.log_softmax(dim=1)).sum(dim=1).mean()
