# SPDX-License-Identifier: Apache-2.0
"""Classification of images and volumes, scored by accuracy, balanced accuracy and AUC."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from medpfl.augment.listed import Given, built
from medpfl.core.errors import ConfigError
from medpfl.data.intensity import Intensity, ZScore
from medpfl.data.preparation import Spec
from medpfl.data.samples import SiteData
from medpfl.data.target import Target
from medpfl.models.contract import Architecture
from medpfl.models.resnet import ResNet
from medpfl.tasks.augmenting import AugmentsInputs
from medpfl.tasks.flips import check_flips, flipped
from medpfl.tasks.labelled import Labelled


@dataclass(frozen=True)
class Classification(AugmentsInputs, Labelled):
    """One class an image, or a volume.

    Args:
        dataset: name of a declared dataset of kind ``images`` or ``volumes`` with ``label``, or ``arrays``.
        size: height and width in pixels to which every image is brought; of volumes the three lengths in voxels
            (right-left, posterior-anterior, axial); for arrays of volumes their depth, height and width, which do not
            change.
        architecture: the network.
        score: metric that chooses the best round.
        loss: what training descends; ``sampling``: whether its steps draw rare classes more often (``Labelled``);
            ``more_metrics``: by which further ones models are tested.
        augment: how training images are changed at random, one after another, or the name of a preset.
        flips: axes along which images are mirrored, too, when a model is tested or predicts, every combination of them;
            the mean of the outputs counts.
        intensity: of the kind ``volumes``: how their intensities are brought into a range.
    """

    dataset: str
    size: tuple[int, ...] = (64, 64)
    architecture: Architecture = field(default_factory=ResNet)
    score: str = "balanced_accuracy"
    augment: Given = ()
    flips: tuple[int, ...] = ()
    intensity: Intensity = ZScore()  # noqa: RUF009 (it is frozen)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", tuple(self.size))  # JSON has lists
        if len(self.size) not in (2, 3) or min(self.size) < 1:
            raise ConfigError(f"Classification's size must be 2 or 3 lengths of at least 1, got {list(self.size)}")
        object.__setattr__(self, "augment", built(self.augment, "Classification.augment", self.size))
        check_flips(self.flips, len(self.size), "Classification")

    @property
    def spec(self) -> Spec:
        forms = ("images",) if len(self.size) == 2 else ("images", "volumes")
        return Spec(Target.CLASS, forms, self.size, intensity=self.intensity)

    def infer(self, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        return flipped(forward, inputs, self.flips, back=False)

    def network(self, data: SiteData) -> nn.Module:
        return self.architecture.build(data.input_shape, self.outputs(data.class_names))
