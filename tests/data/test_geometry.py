# SPDX-License-Identifier: Apache-2.0
"""Augmentation does without MONAI's account of an image's place: same values; preparing in another thread keeps it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import torch
from monai.data import get_track_meta, set_track_meta

from medpfl.augment.presets import PRESETS, preset
from medpfl.data.geometry import geometry
from medpfl.data.volumes.prepare import prepare


@pytest.mark.parametrize("shape", [(3, 24, 32), (1, 12, 16, 8)])
def test_values_are_the_same_with_and_without_the_account(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(shape, generator=generator)
    mask = torch.randint(0, 3, shape[1:], dtype=torch.uint8, generator=generator)
    named = {
        one
        for name in PRESETS
        if len(shape) == 3 or name in ("light", "nnunet", "mri")
        for one in preset(name, shape[1:])
    }
    for one in named:
        with geometry(False):
            quick, moved = one.change(image, mask, np.random.RandomState(1))
        with geometry(True):
            noted, also = one.change(image, mask, np.random.RandomState(1))
        assert torch.equal(quick, noted) and moved is not None and also is not None and torch.equal(moved, also), one


def test_a_volume_is_prepared_right_while_another_thread_augments() -> None:
    volume, affine = np.random.default_rng(0).normal(size=(1, 6, 5, 4)), np.diag([-2.0, -2.0, 3.0, 1.0])
    alone = prepare(volume, affine, (1.0, 1.0, 3.0), None)
    entered, leave = Event(), Event()

    def augment() -> bool:
        with geometry(False):
            entered.set()
            leave.wait(10)
            return get_track_meta()

    with ThreadPoolExecutor(2) as pool:
        augmenting = pool.submit(augment)
        assert entered.wait(10)
        preparing = pool.submit(prepare, volume, affine, (1.0, 1.0, 3.0), None)
        assert not preparing.done()
        leave.set()
        assert augmenting.result(10) is False
        assert torch.equal(torch.as_tensor(preparing.result(10)), torch.as_tensor(alone))
        assert tuple(alone.shape) == (1, 11, 9, 4) and get_track_meta()


def test_what_the_process_had_set_is_set_again() -> None:
    set_track_meta(False)
    try:
        with geometry(True):
            assert get_track_meta()
        assert not get_track_meta()
    finally:
        set_track_meta(True)
