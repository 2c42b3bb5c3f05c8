# SPDX-License-Identifier: Apache-2.0
"""What is learnt: declared data to batches, network, loss and metrics. One file a task."""

from medpfl.tasks.base import Evaluation, Samples, SiteData, Task
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular

__all__ = ["Evaluation", "Samples", "Segmentation", "SiteData", "Tabular", "Task"]
