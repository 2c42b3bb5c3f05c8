# SPDX-License-Identifier: Apache-2.0
"""The hospitals' data under one split: the site file's own, drawn anew with a seed of the comparison's, or a fold."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError, DataError
from medpfl.data.declared import SPLITS
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import SiteFile, load_site_file
from medpfl.data.target import Target
from medpfl.store import fingerprint
from medpfl.tasks.contract import Task

Read = Callable[[Path, str], SiteFile]


@dataclass(frozen=True)
class Split:
    """One way to cut all hospitals' data.

    Attributes:
        seed: of every site file's split rule, or the number of its fold; None: as the site files say.
        digests: hospital to the digest of its samples and of how they are cut.
        sizes: hospital to split to number of samples.
        shapes: hospital to the shape of an input.
        labels: hospital to class to its number of samples in all splits; empty where a sample has no single class.
    """

    seed: int | None
    digests: dict[str, str]
    sizes: dict[str, dict[str, int]]
    shapes: dict[str, tuple[int, ...]]
    labels: dict[str, dict[str, int]]


def reader(seed: int | None) -> Read:
    """Reads a site file whose datasets are cut with ``seed``, or by the fold of that number (None: with their own).

    It raises DataError if there is no such fold.
    """
    return load_site_file if seed is None else partial(_redrawn, seed)


def _redrawn(seed: int, path: Path, site: str) -> SiteFile:
    declared = load_site_file(path, site)
    for name, dataset in declared.datasets.items():
        changed: dict[str, object] | None = None
        if dataset.split.column is None:
            changed = {"seed": seed}
        elif folds := dataset.split.folds:
            if seed >= len(folds):
                raise DataError(f"{path}: dataset '{name}' has {len(folds)} folds, numbered from 0; got split {seed}")
            changed = {"column": folds[seed]}
        if changed:
            rule = dataset.split.model_copy(update=changed)
            declared.datasets[name] = dataset.model_copy(update={"split": rule})
    return declared


def read_splits(task: Task, site_files: dict[str, Path], seeds: list[int] | None) -> tuple[list[Split], SiteData]:
    """Read all hospitals' data once a split; the second result is the first hospital's data in the first one.

    Raises:
        ConfigError: a split lacks a part, or does not depend on its seed.
        MedPFLError: a site file or the data are wrong.
    """
    found: list[Split] = []
    first: SiteData | None = None
    each: list[int | None] = [*seeds] if seeds else [None]
    for seed in each:
        digests, sizes, shapes, labels = {}, {}, {}, {}
        for site in sorted(site_files):
            data = task.load(reader(seed)(site_files[site], site))
            sizes[site] = {split: len(samples) for split, samples in data.splits.items()}
            shapes[site] = data.input_shape
            for split in SPLITS:
                if not sizes[site][split]:
                    raise ConfigError(
                        f"{site} has no {split} samples; a comparison chooses rounds on validation, reads test"
                    )
            digests[site] = split_digest(data)
            if task.spec.target is not Target.MASK:
                targets = torch.cat([samples.targets[:] for samples in data.splits.values()])
                if (counts := task.spec.target.counts(targets, len(data.class_names))) is not None:
                    labels[site] = dict(zip(data.class_names, counts, strict=True))
            for other in found:
                if other.digests[site] == digests[site]:
                    raise ConfigError(
                        f"'splits': {site}'s data are cut alike with the seeds {other.seed} and {seed}; several splits "
                        "need a site file whose split MedPFL draws, or that names folds, not one column or list"
                    )
            first = first or data
        found.append(Split(seed, digests, sizes, shapes, labels))
    assert first is not None
    return found, first


def split_digest(data: SiteData) -> str:
    """Over every sample's split, case, label and inputs, which cases are of one patient (intervals draw patients), and
    which classes label maps show.

    A million values of inputs are read at a time: they may lie in files that memory does not hold.
    """
    parts: list[Any] = []
    for split, samples in sorted(data.splits.items()):
        rows = 1_000_000 // max(1, samples.inputs[:1].numel())
        owned = samples.patients.tolist()
        grouped = [owned] if len(set(owned)) < len(owned) else []
        first = _fingerprint(samples, 0, rows)
        more = [_fingerprint(samples, start, max(1, rows)) for start in range(rows, len(samples), max(1, rows))]
        shown = [] if samples.annotated is None else [{"annotated": samples.annotated}]
        rest = [*grouped, *more, *_beyond_views(samples), *shown]
        parts.append([split, samples.names, samples.case.tolist(), first, *rest])
    return digest_of([*parts, data.class_names])


def _fingerprint(samples: Samples, start: int, rows: int) -> str:
    chosen = slice(start, start + rows)
    return fingerprint({"inputs": samples.inputs[chosen], "targets": samples.targets[chosen]})


def _beyond_views(samples: Samples) -> list[str]:
    """Of whole cases, of which the rows are only the centres."""
    found = []
    for rows in (samples.inputs, samples.targets):
        if isinstance(rows, CaseRows):
            found += [fingerprint({"whole": rows.whole(number)}) for number in range(len(rows))]
    return found
