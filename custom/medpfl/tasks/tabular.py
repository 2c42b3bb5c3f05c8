# SPDX-License-Identifier: Apache-2.0
"""Classification of table rows, scored by accuracy, balanced accuracy and AUC."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.data.contract import NewCase
from medpfl.data.declared import SPLITS
from medpfl.data.samples import Samples, SiteData, to_tensor
from medpfl.data.site_file import SiteFile
from medpfl.data.table.declare import Table, new_rows
from medpfl.models.base import Architecture
from medpfl.tasks.labelled import Labelled


@dataclass(frozen=True)
class Tabular(Labelled):
    """A multilayer perceptron (without hidden layers, logistic regression) or a given network. Loss: cross-entropy.

    Args:
        dataset: name of a declared dataset of kind ``table``.
        hidden: widths of hidden layers (each followed by ReLU).
        architecture: the network, in place of the perceptron.
        score: metric that chooses the best round.
    """

    dataset: str
    hidden: tuple[int, ...] = ()
    architecture: Architecture | None = None
    score: str = "accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON has lists
        if any(width < 1 for width in self.hidden):
            raise ConfigError(f"Tabular's hidden widths must be at least 1, got {list(self.hidden)}")
        if self.hidden and self.architecture is not None:
            raise ConfigError("Tabular: 'hidden' is of the perceptron; leave it out where there is an 'architecture'")

    def load(self, site_file: SiteFile) -> SiteData:
        data = site_file.dataset(self.dataset, Table).load()
        splits = {
            split: Samples(
                to_tensor(data.features[data.splits[split]], torch.float32),
                to_tensor(data.classes[data.splits[split]], torch.int64),
                np.arange(len(data.splits[split])),
                [data.rows[index] for index in data.splits[split]],
                len(data.class_names),
            )
            for split in SPLITS
        }
        return SiteData(splits, data.class_names, data.preparation)

    def new_cases(self, path: Path, preparation: dict[str, Any]) -> Iterator[NewCase]:
        """The rows of a CSV, TSV or Parquet file; a label is not needed."""
        names, values = new_rows(path, preparation)
        for name, row in zip(names, values, strict=True):
            yield NewCase(name, to_tensor(row[None], torch.float32))

    def network(self, data: SiteData) -> nn.Module:
        outputs = self.outputs(data.class_names)
        if self.architecture is not None:
            return self.architecture.build(tuple(data.splits["train"].inputs.shape[1:]), outputs)
        widths = [data.splits["train"].inputs.shape[1], *self.hidden]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
