# SPDX-License-Identifier: Apache-2.0
"""Classification of windows of time series, scored by accuracy, balanced accuracy and AUC."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from medpfl.data.contract import NewCase
from medpfl.data.samples import SiteData
from medpfl.data.series.declare import Series
from medpfl.data.series.recordings import new_recordings
from medpfl.data.site_file import SiteFile
from medpfl.models.base import Architecture
from medpfl.models.conv1d import Conv1d
from medpfl.tasks.labelled import Labelled


@dataclass(frozen=True)
class TimeSeries(Labelled):
    """A convolutional network on windows, each a case of its own. Loss: cross-entropy.

    Args:
        dataset: name of a declared dataset of kind ``series``.
        architecture: the network, for inputs of channels x length.
        score: metric that chooses the best round.
    """

    dataset: str
    architecture: Architecture = field(default_factory=Conv1d)
    score: str = "accuracy"

    def load(self, site_file: SiteFile) -> SiteData:
        return site_file.dataset(self.dataset, Series).load()

    def network(self, data: SiteData) -> nn.Module:
        shape = tuple(data.splits["train"].inputs.shape[1:])
        return self.architecture.build(shape, self.outputs(data.class_names))

    def new_cases(self, path: Path, preparation: dict[str, Any]) -> Iterator[NewCase]:
        """The recordings of a file, or of all files of a folder, each with its windows as samples; no label needed."""
        for name, windows in new_recordings(path, preparation):
            yield NewCase(name, windows)
