# SPDX-License-Identifier: Apache-2.0
"""Metrics of segmentations: a class index for every pixel or voxel."""

from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.base import CaseMetric


class Dice(CaseMetric):
    """Dice of each image or volume (its slices taken together), averaged over the declared foreground classes. A class
    that is in neither the label map nor the decision of a case counts as 1 (nothing was there, nothing was found).
    Images count at the task's size."""

    name = "dice"
    range = (0.0, 1.0)

    def of_cases(self, decisions: Tensor, samples: Samples) -> list[float]:
        from monai.metrics import compute_dice
        from monai.networks import one_hot

        found_dice = []
        for pair in samples.masks(decisions):
            found, truth = (one_hot(labels[None, None].long(), samples.classes) for labels in pair)
            dice = compute_dice(found, truth, include_background=False, ignore_empty=False)
            found_dice.append(float(dice.double().mean()))
        return found_dice
