# SPDX-License-Identifier: Apache-2.0
"""What is learnt: declared data to batches, network, loss and metrics. One file a task."""

from medpfl.data.samples import Samples, SiteData
from medpfl.tasks.base import Evaluation, Task
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from medpfl.tasks.time_series import TimeSeries

__all__ = ["Classification", "Evaluation", "Samples", "Segmentation", "SiteData", "Tabular", "Task", "TimeSeries"]
