# SPDX-License-Identifier: Apache-2.0
"""What may be wrong between a job and the data of a hospital, which neither shows alone."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from medpfl.check.inspection import Split
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.tasks.contract import Task

LEAST_PIXELS = 2  # of a structure in a case; less is no outline
OFTEN = 0.8  # share of the validation cases beyond which always giving one answer looks good
EVENTS = 10  # training cases of the rarest class for each feature (Peduzzi et al., J. Clin. Epidemiol. 1996)
MOST_WEIGHTS = 100_000  # for each training case: a ResNet18 (11 million weights) for 110 images
FEWEST_WEIGHTS = 0.1


def advice(task: Task, data: SiteData, weights: int, splits: Mapping[str, Split]) -> list[str]:
    """Warnings, one sentence each.

    Args:
        data: as the job prepares them.
        weights: of the job's network; 0: not known, because it will be planned.
        splits: what the files hold; none: not known.
    """
    return [
        *_lost_structures(task, data, splits),
        *_short_cases(task, data),
        *_one_answer(task, data),
        *(_size_of_network(task, data, weights) if weights else ()),
    ]


def _lost_structures(task: Task, data: SiteData, splits: Mapping[str, Split]) -> Iterator[str]:
    if task.spec.target is not Target.MASK:
        return
    size = " x ".join(map(str, data.input_shape[1:]))
    for split, samples in data.splits.items():
        if split not in splits or not len(samples):
            continue
        left = torch.zeros(samples.classes, dtype=torch.int64)
        for counts in _counts(samples):
            left += counts >= LEAST_PIXELS
        for number, held in enumerate(splits[split].classes):
            if number and (samples.annotated is None or number in samples.annotated) and left[number] < held:
                yield (
                    f"{task.dataset}: {held} cases of the {split} split hold '{data.class_names[number]}', and at the "
                    f"job's size of {size} only {int(left[number])} of them have at least {LEAST_PIXELS} pixels of it; "
                    "take a larger size or a smaller spacing"
                )


def _short_cases(task: Task, data: SiteData) -> Iterator[str]:
    """Of cases that are shown in patches, those that fill less than half of one."""
    for split, samples in data.splits.items():
        rows = samples.inputs
        if not isinstance(rows, CaseRows):
            continue
        lengths = {name: rows.spatial(number) for number, name in enumerate(samples.names)}
        short = [
            name for name, sides in lengths.items() if any(2 * a < b for a, b in zip(sides, rows.size, strict=True))
        ]
        if short:
            shown = " x ".join(map(str, lengths[short[0]]))
            yield (
                f"{task.dataset}: {len(short)} of {len(samples.names)} cases of the {split} split fill less than half "
                f"of the job's patch of {' x '.join(map(str, rows.size))} along an axis ({short[0]} has {shown} at the "
                "job's spacing): the network will see zeros there; take a smaller size, or look whether this is a "
                "whole volume"
            )


def _counts(samples: Samples) -> Iterator[Tensor]:
    """Of each case its prepared pixels of each class."""
    targets = samples.targets
    for case in range(len(samples.names)):
        rows = torch.from_numpy(samples.case == case).nonzero()[:, 0]
        parts = [targets.whole(int(row)) for row in rows] if isinstance(targets, CaseRows) else [targets[rows]]
        yield sum(
            (torch.bincount(part.flatten().long(), minlength=samples.classes) for part in parts),
            torch.zeros(samples.classes, dtype=torch.int64),
        )[: samples.classes]


def _one_answer(task: Task, data: SiteData) -> Iterator[str]:
    samples = data.splits["validation"]
    if task.spec.target is not Target.CLASS or task.score != "accuracy" or not len(samples):
        return
    counts = torch.bincount(samples.targets[:].flatten().long(), minlength=samples.classes)
    share = float(counts.max()) / len(samples)
    if share >= OFTEN:
        yield (
            f"{task.dataset}: to answer '{data.class_names[int(counts.argmax())]}' whatever the case is right in "
            f"{share:.0%} of the validation cases, and the job's score is accuracy: the best round may be one that has "
            "learnt nothing else; balanced_accuracy or auc as 'score' tells such a model"
        )


def _size_of_network(task: Task, data: SiteData, weights: int) -> Iterator[str]:
    train = data.splits["train"]
    cases, features = len(train.names), data.input_shape
    if len(features) == 1:
        if task.spec.target is Target.CLASS:
            counts = torch.bincount(train.targets[:].flatten().long(), minlength=train.classes)
            rarest = int(torch.where(counts > 0, counts, counts.max()).argmin())
            if counts[rarest] < EVENTS * features[0]:
                yield (
                    f"{task.dataset}: {int(counts[rarest])} training cases have '{data.class_names[rarest]}', and "
                    f"there are {features[0]} features; by a common rule fewer than {EVENTS} a feature are few for a "
                    "model that is trained here alone"
                )
    elif weights > MOST_WEIGHTS * cases:
        yield (
            f"{task.dataset}: the network has {weights:,} weights for {cases} training cases, more than "
            f"{MOST_WEIGHTS:,} a case: expect it to learn the cases by heart; take a smaller network, augmentation or "
            "start weights"
        )
    elif weights < FEWEST_WEIGHTS * cases:
        yield (
            f"{task.dataset}: the network has {weights:,} weights for {cases} training cases, fewer than one for "
            f"{round(1 / FEWEST_WEIGHTS)} cases: it may be too small to learn what they show"
        )
