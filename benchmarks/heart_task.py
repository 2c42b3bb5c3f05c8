# SPDX-License-Identifier: Apache-2.0
"""The heart task with what FLamby does otherwise: its initial weights, and a training set pooled from four centres."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from medpfl.data.samples import Samples, SiteData, empty_like, to_tensor
from medpfl.data.site_file import SiteFile
from medpfl.data.table.declare import Table, TableData, read_table
from medpfl.tasks.tabular import Tabular

# FLamby puts the one-hot columns last: position in its order of each of our columns (see demo/heart.py).
_FLAMBY_POSITION = [0, 1, 8, 9, 10, 2, 3, 4, 11, 12, 5, 6, 7]


@dataclass(frozen=True)
class HeartTabular(Tabular):
    """Tabular, which with ``start`` has the initial weights that FLamby's benchmark has with this seed."""

    start: int | None = field(default=None, kw_only=True)

    def network(self, data: SiteData) -> nn.Module:
        if self.start is None:
            return super().network(data)
        torch.manual_seed(self.start)
        network = super().network(data)
        assert isinstance(network, nn.Sequential)
        layer = network[0]
        assert isinstance(layer, nn.Linear) and layer.in_features == len(_FLAMBY_POSITION)
        with torch.no_grad():
            layer.weight.copy_(layer.weight[:, _FLAMBY_POSITION].clone())
        return network


@dataclass(frozen=True)
class PooledTabular(HeartTabular):
    """All files of the declared dataset as one training set, each split by itself as its own hospital splits it.

    As in FLamby, columns are standardised with the statistics of the pooled training part.
    """

    def load(self, site_file: SiteFile) -> SiteData:
        declared = site_file.dataset(self.dataset, Table)
        pooled = read_table(declared)
        parts = [read_table(declared.model_copy(update={"files": [file]})) for file in declared.files]
        train, test = (_rows(parts, pooled, split) for split in ("train", "test"))
        # The pooled table comes standardised with other rows; standardising is affine, so doing it again is exact.
        values = pooled.features
        values = (values - values[train].mean(axis=0)) / values[train].std(axis=0, ddof=1)
        splits = {
            name: Samples(
                to_tensor(values[rows], torch.float32),
                to_tensor(pooled.targets[rows], torch.int64),
                np.arange(len(rows)),
                [pooled.rows[row] for row in rows],
            )
            for name, rows in (("train", train), ("test", test))
        }
        return SiteData({**splits, "validation": empty_like(splits["train"])}, pooled.class_names)


def _rows(parts: list[TableData], pooled: TableData, split: str) -> list[int]:
    position = {name: row for row, name in enumerate(pooled.rows)}
    return [position[part.rows[row]] for part in parts for row in part.splits[split]]
