# SPDX-License-Identifier: Apache-2.0
"""A round's augmented batches: made once while they fit, and again the same where they do not."""

import torch
from torch import Tensor

from medpfl.methods.presented import Presented


def test_a_batch_is_made_once_a_round_as_far_as_memory_lasts() -> None:
    made: list[int] = []

    def make() -> tuple[Tensor, Tensor]:
        made.append(len(made))
        return torch.full((10,), float(len(made))), torch.zeros(10, dtype=torch.uint8)  # 50 bytes

    presented = Presented(most=120)
    keys = [("batches", step, b"rows") for step in range(3)]
    first = [presented.batch(1, key, make) for key in keys]
    again = [presented.batch(1, key, make) for key in keys]
    assert made == [0, 1, 2, 3]  # the third did not fit
    assert all(one[0] is other[0] for one, other in zip(first[:2], again[:2], strict=True))
    assert presented.batch(1, ("batches", 0, b"other rows"), make)[0][0] == 5
    assert presented.batch(1, ("exchange", 0, b"rows"), make)[0][0] == 6
    assert presented.batch(2, keys[0], make)[0][0] == 7
    assert presented.batch(2, keys[0], make)[0][0] == 7


def test_few_batches_are_made_ahead() -> None:
    made: list[int] = []
    batches = Presented(ahead=True).in_turn(made.append, range(100))
    next(batches)
    del batches  # whoever stops early leaves the others unmade
    assert len(made) <= 3
