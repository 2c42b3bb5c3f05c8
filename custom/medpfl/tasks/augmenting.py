# SPDX-License-Identifier: Apache-2.0
"""Tasks whose inputs alone are augmented: their targets stay what they are."""

import torch
from torch import Tensor

from medpfl.augment.listed import Given, augmented
from medpfl.data.samples import Samples
from medpfl.tasks.contract import Task


class AugmentsInputs(Task):
    """``augment`` is a field of the tasks that derive from it."""

    augment: Given

    def present(self, samples: Samples, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = super().present(samples, chosen, generator)
        return augmented(self.augment, inputs, None, generator)[0], targets

    @property
    def augments(self) -> bool:
        return bool(self.augment)

    @property
    def shows_as_they_are(self) -> bool:
        return not self.augments and type(self).present is AugmentsInputs.present
