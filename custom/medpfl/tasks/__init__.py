# SPDX-License-Identifier: Apache-2.0
"""What is learnt: declared data to batches, network, loss and metrics. One file a task."""

from medpfl.data.samples import Samples, SiteData
from medpfl.tasks.classification import Classification
from medpfl.tasks.contract import Evaluation, Task
from medpfl.tasks.multi_label import MultiLabel
from medpfl.tasks.partly_labelled import PartlyLabelled
from medpfl.tasks.region_segmentation import RegionSegmentation
from medpfl.tasks.regression import Regression
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.survival import Survival
from medpfl.tasks.tabular import Tabular
from medpfl.tasks.time_series import TimeSeries

__all__ = [
    "Classification",
    "Evaluation",
    "MultiLabel",
    "PartlyLabelled",
    "RegionSegmentation",
    "Regression",
    "Samples",
    "Segmentation",
    "SiteData",
    "Survival",
    "Tabular",
    "Task",
    "TimeSeries",
]
