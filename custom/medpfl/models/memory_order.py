# SPDX-License-Identifier: Apache-2.0
"""The order of images in memory that networks compute fastest in, where the library computes safely in it."""

import os
from typing import Any

import torch
from torch import nn

VECTOR = 8
"""float32 values in one AVX2 register: the width in which oneDNN writes a pixel's channels."""


FAULTY = ("2.13.0",)
"""Versions of torch in whose oneDNN the fault that ``unsafe`` describes was seen."""


def channels_last(network: nn.Module) -> nn.Module:
    """The same network, which holds images (B x C x H x W) with a position's channels side by side from its first layer
    on; weights and other inputs stay as they are. Convolutions take 0.6 to 0.95 of the time then, max pooling a tenth.

    Layers for which that order is ``unsafe`` get their images in the plain order.
    """
    network.register_forward_pre_hook(_reordered)
    for module in network.modules():
        if unsafe(module):
            module.register_forward_pre_hook(_plain)
    return network


def unsafe(module: nn.Module) -> bool:
    """Whether oneDNN writes outside the layer's memory when its images are channels last.

    oneDNN 3.12 (in torch 2.13.0), on processors with AVX2 and without AVX-512: the gradient towards the images of a
    convolution whose kernel is smaller than its stride is set to zero where no output looked, a whole vector at a time,
    so a pixel of 2 to 7 channels loses what follows it, and the last one damages the heap. Found in
    docs/results/convolutions.md for kernels of 1; the rule here takes in every kernel smaller than its stride.
    """
    if not isinstance(module, nn.Conv2d):
        return False
    skips = any(kernel < stride for kernel, stride in zip(module.kernel_size, module.stride, strict=True))
    return skips and module.in_channels < VECTOR


def faulty_here() -> bool:
    """Whether this torch, on this processor, writes outside the memory of layers that are ``unsafe``.

    Other versions of torch were not looked at; ``benchmarks/convolution_sweep.py`` looks.
    """
    best = os.environ.get("ONEDNN_MAX_CPU_ISA", torch.backends.cpu.get_cpu_capability())
    return torch.__version__.split("+")[0] in FAULTY and best == "AVX2"


def _reordered(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    images, *rest = args
    return (images.contiguous(memory_format=torch.channels_last), *rest) if images.dim() == 4 else None


def _plain(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].contiguous(), *args[1:])
