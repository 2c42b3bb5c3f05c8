# SPDX-License-Identifier: Apache-2.0
"""Pictures of a hospital's worst, median and best test case, for its own page: images of patients, which never leave
it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medpfl.data.declared import StorageRule
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Budget, CaseStore, Samples, SiteData
from medpfl.data.target import Target
from medpfl.deployed.evaluate import decide
from medpfl.methods.contract import Method
from medpfl.rounds.hospital.cases import Listed, ranked
from medpfl.rounds.hospital.details import Pictured, Which
from medpfl.tasks.contract import Evaluation, Task

TRUTH, FOUND = "#ffd23f", "#3fa7ff"
"""Colours of the hospital's outline and of the model's."""


def pictures_of(
    method: Method,
    name: str,
    networks: nn.ModuleDict,
    task: Task,
    data: SiteData,
    device: torch.device,
    tested: Evaluation,
) -> tuple[Pictured, ...]:
    """Of a model's test; none where the cases are no images, or nothing says which is worse.

    Args:
        name: the method's own name of the model that was ``tested``, and ``networks``: those that it predicts with.
    """
    samples = data.splits["test"]
    if len(samples.inputs.shape) not in (4, 5):
        return ()
    form = data.preparation.form if data.preparation else ""
    found = []
    for which, listed in _shown(ranked(tested.cases, task.score, task.measure, data.class_names)):
        mine = _of_case(samples, samples.names.index(listed.case))
        masks = None
        if task.spec.target is Target.MASK:
            masks = next(mine.masks(decide(method, name, networks, task, mine, device)))
        png = _picture(_whole(mine), masks, form == "volumes", task.spec.spacing)
        found.append(Pictured(which=which, case=listed.case, said=listed.said, outlined=masks is not None, png=png))
    return tuple(found)


def _shown(listed: list[Listed]) -> Iterator[tuple[Which, Listed]]:
    """Each case once."""
    places: tuple[tuple[Which, int], ...] = (("worst", 0), ("median", len(listed) // 2), ("best", len(listed) - 1))
    seen: set[int] = set()
    for which, place in places:
        if listed and place not in seen:
            seen.add(place)
            yield which, listed[place]


def _of_case(samples: Samples, place: int) -> Samples:
    """All samples of one case."""
    rows = torch.from_numpy(np.flatnonzero(samples.case == place))
    inputs, targets = samples.inputs, samples.targets
    if isinstance(inputs, CaseRows) and isinstance(targets, CaseRows):
        stores = []
        for each in (inputs, targets):
            store = CaseStore(Budget(StorageRule(), Path()), each.size)
            for row in rows.tolist():
                store.append(each.whole(row))
            stores.append(store.finish())
        inputs, targets = stores
    else:
        inputs, targets = inputs[rows], targets[rows]
    case = np.zeros(len(rows), dtype=np.int64)
    return Samples(inputs, targets, case, [samples.names[place]], samples.classes, samples.annotated)


def _whole(samples: Samples) -> Tensor:
    """The image of one case, C x H x W x D."""
    if isinstance(samples.inputs, CaseRows):
        each = [samples.inputs.whole(row) for row in range(len(samples))]
    else:
        each = list(samples.inputs[:])
    return each[0] if each[0].ndim == 4 else torch.stack(each, dim=-1)


def _picture(
    image: Tensor, masks: tuple[Tensor, Tensor] | None, volume: bool, spacing: tuple[float, float, float]
) -> str:
    """The image or its axial slice that tells most: with most of the true outline, or of the found one, or the middle
    one; a PNG in base64."""
    from medpfl.check.pictures import Outline, Picture, draw, radiological

    index, labels = image.shape[-1] // 2, []
    if masks is not None:
        found, truth = (mask.numpy().astype(np.uint8) for mask in masks)
        areas = next((area for mask in (truth, found) if (area := (mask > 0).sum(axis=(0, 1))).any()), None)
        index = index if areas is None else int(areas.argmax())
        labels = [truth[..., index], found[..., index]]
    shown: NDArray[np.float32] = image[..., index].numpy()
    if volume:
        shown = radiological(shown[:1])
        labels = [radiological(label) for label in labels]
    elif len(shown) == 3:  # colours, prepared for the network
        shown = (shown - shown.min()) / max(float(np.ptp(shown)), 1e-9)
    outlines = [
        Outline(label, (colour,), width) for label, colour, width in zip(labels, (TRUTH, FOUND), (4, 2), strict=False)
    ]
    size = (spacing[1], spacing[0]) if volume and masks is not None else (1.0, 1.0)
    return Picture(draw(shown, outlines, size)).png()
