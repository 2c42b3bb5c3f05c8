# SPDX-License-Identifier: Apache-2.0
"""Test-time flips: the mean over mirror images, of images, windows and classes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation


def uneven(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(2, 1, *shape, generator=torch.Generator().manual_seed(1))


def test_without_flips_outputs_are_the_networks_own() -> None:
    inputs = uneven((8, 8))
    for task in (Segmentation("organ", size=(8, 8), architecture=UNet((4, 8))), Classification("a", size=(8, 8))):
        assert task.infer(torch.neg, inputs).equal(-inputs)


def test_masks_are_mirrored_back_and_averaged_before_softmax() -> None:
    task = Segmentation("organ", size=(8, 12), architecture=UNet((4, 8)), flips=(0, 1))
    network = torch.nn.Conv2d(1, 2, 3, padding=1)
    inputs = uneven((8, 12))
    by_hand = sum(network(inputs.flip(axes)).flip(axes) for axes in ((), (2,), (3,), (2, 3)))
    with torch.no_grad():
        found = task.infer(network, inputs)
        assert torch.allclose(found, by_hand / 4, atol=1e-6)
        mirrored = task.infer(network, inputs.flip(3))
    assert torch.allclose(mirrored.flip(3), found, atol=1e-6)
    assert not torch.allclose(found, network(inputs), atol=1e-3)


def test_windows_of_a_volume_are_mirrored_one_by_one() -> None:
    task = Segmentation("organ", size=(8, 8, 8), spacing=(1, 1, 1), architecture=UNet((4, 8)), flips=(2,))
    calls: list[Tensor] = []

    def forward(given: Tensor) -> Tensor:
        calls.append(given)
        return given * torch.arange(8.0)

    found = task.infer(forward, torch.ones(1, 1, 8, 8, 8))
    assert [tuple(call.shape[-3:]) for call in calls] == [(8, 8, 8)] * 2
    assert torch.allclose(found, torch.full_like(found, 3.5))


def test_classes_are_averaged() -> None:
    task = Classification("a", size=(6, 6), architecture=ResNet(), flips=(1,))
    inputs = uneven((6, 6))

    def left(given: Tensor) -> Tensor:
        return given[:, 0, :, :3].sum(dim=(1, 2))[:, None]

    assert torch.allclose(task.infer(left, inputs), inputs.sum(dim=(2, 3)) / 2, atol=1e-5)


@pytest.mark.parametrize("flips", [(2,), (0, 0), (-1,), "all"])
def test_axes_that_images_do_not_have_are_refused(flips: Any) -> None:
    with pytest.raises(ConfigError, match="flips"):
        Classification("a", flips=flips)
