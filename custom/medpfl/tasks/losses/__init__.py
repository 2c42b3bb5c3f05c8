# SPDX-License-Identifier: Apache-2.0
"""What training descends. ``base`` says what a loss is; MONAI's and torch's code computes it."""

from medpfl.tasks.losses.contract import Loss
from medpfl.tasks.losses.entropy import CrossEntropy, Focal
from medpfl.tasks.losses.labels import BinaryCrossEntropy
from medpfl.tasks.losses.overlap import DiceCE, DiceFocal, Tversky

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "DiceCE", "DiceFocal", "Focal", "Loss", "Tversky"]
