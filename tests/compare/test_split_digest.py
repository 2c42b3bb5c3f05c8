# SPDX-License-Identifier: Apache-2.0
"""Data that have changed make other runs, wherever the change is."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from medpfl.compare.data import split_digest
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples, SiteData

LARGE = 400_000
"""Values of a sample; a million are read at a time."""


def large() -> Samples:
    return Samples(torch.zeros(7, LARGE), torch.zeros(7, dtype=torch.int64), np.arange(7), list("abcdefg"))


def volumes() -> Samples:
    """Whole cases of 6 x 6 x 6 and 4 x 4 x 4, of which a row shows the 2 x 2 x 2 in the middle."""
    shapes = [(6, 6, 6), (4, 4, 4)]
    values = sum(int(np.prod(shape)) for shape in shapes)
    inputs = CaseRows(torch.zeros(values), [(1, *shape) for shape in shapes], (2, 2, 2))
    return Samples(
        inputs, CaseRows(torch.zeros(values, dtype=torch.uint8), shapes, (2, 2, 2)), np.arange(2), ["a", "b"]
    )


def digest(samples: Samples) -> str:
    return split_digest(SiteData({"train": samples}, ["no", "yes"]))


@pytest.mark.parametrize("part", ["inputs", "targets"])
@pytest.mark.parametrize("make", [large, volumes])
def test_every_value_counts(make: Callable[[], Samples], part: str) -> None:
    """Of inputs and labels only what a million values of inputs hold counted, and of whole volumes their middle: a
    mask that was corrected later, or the label of the last image, left finished runs what they were."""
    known = digest(make())
    assert digest(make()) == known
    for place in (0, -1):
        changed = make()
        rows = getattr(changed, part)
        values = rows.values if isinstance(rows, CaseRows) else rows
        assert isinstance(values, torch.Tensor)
        values.view(-1)[place] += 1
        assert digest(changed) != known


def test_what_label_maps_show_counts() -> None:
    """A class that a hospital declares as not annotated changes its loss, and no value."""
    assert len({digest(replace(volumes(), annotated=annotated)) for annotated in (None, (1,), (1, 2))}) == 3
