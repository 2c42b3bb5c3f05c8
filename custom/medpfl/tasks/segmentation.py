# SPDX-License-Identifier: Apache-2.0
"""Segmentation of images, of volumes slice by slice along the axial axis, or of either by patches."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.augment.listed import Given, augmented, built
from medpfl.core.errors import ConfigError
from medpfl.data.fingerprint import Fingerprint, Planned
from medpfl.data.intensity import Intensity, ZScore
from medpfl.data.preparation import Spec
from medpfl.data.readout import undecided
from medpfl.data.rows import CaseRows
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.models.auto import Auto
from medpfl.models.contract import Architecture
from medpfl.models.unet import UNet
from medpfl.tasks.contract import Task
from medpfl.tasks.flips import check_flips, flipped
from medpfl.tasks.losses import DiceCE, Loss
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.masks import Dice, MaskMetric, mask_metrics, of_one_class
from medpfl.tasks.patches import draw_patches, slide
from medpfl.tasks.planning import architecture_of
from medpfl.tasks.planning import plan as make_plan


@dataclass(frozen=True)
class Segmentation(Task):
    """A class for every pixel of images or of axial slices, or for every voxel of volumes.

    Args:
        dataset: name of a declared dataset of kind ``volumes``, or ``images`` with ``masks``.
        size: height and width to which images are resized, or to which slices are cropped or padded (voxels): of the
            lengths that the architecture takes. Three lengths (voxels; right-left, posterior-anterior, axial): 3-D
            networks train on patches of this size, and predict whole volumes window by window. With the architecture
            ``Auto`` three lengths that the planned patch must not be larger than; its spacing is planned too.
        patches: of two lengths: images and slices stay as large as they are, networks train on patches of ``size`` and
            predict window by window, as with three lengths. For photographs whose details would not survive a resize.
        spacing: of volumes: voxel size in mm to which each is resampled (right-left, posterior-anterior, axial).
        architecture: the network.
        score: metric that chooses the best round.
        loss: what training descends.
        more_metrics: further metrics by which models are tested: hd95, surface_dice, volume_error; and any of them, or
            dice, of one class by its number in the declared order: dice_1, hd95_2.
        tolerance: distance in mm up to which surfaces agree, for surface_dice.
        augment: how training samples are changed at random, one after another, or the name of a preset.
        flips: axes along which images are mirrored, too, when a model is tested or predicts, every combination of them;
            the mean of the outputs counts. Of volumes and their slices axis 0 is right-left.
        intensity: of volumes: how their intensities are brought into a range.
    """

    dataset: str
    size: tuple[int, ...] = (64, 64)
    spacing: tuple[float, float, float] = (3.0, 3.0, 8.0)
    architecture: Architecture = field(default_factory=UNet)
    score: str = "dice"
    loss: Loss = DiceCE()  # noqa: RUF009 (it is frozen)
    more_metrics: tuple[str, ...] = ()
    tolerance: float = 2.0
    augment: Given = ()
    flips: tuple[int, ...] = ()
    intensity: Intensity = ZScore()  # noqa: RUF009 (it is frozen)
    patches: bool = False
    metrics: ClassVar[tuple[Metric, ...]] = (Dice(),)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss.suits(Target.MASK, type(self).__name__)
        for name in ("size", "spacing"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists
        self._check_size()
        if len(self.spacing) != 3 or not all(length > 0 for length in self.spacing):
            raise ConfigError(f"Segmentation's spacing must be 3 positive numbers (mm), got {list(self.spacing)}")
        object.__setattr__(self, "augment", built(self.augment, "Segmentation.augment", self.size))
        check_flips(self.flips, len(self.size), "Segmentation")
        if self.tolerance < 0:
            raise ConfigError(f"Segmentation's tolerance (mm) must be at least 0, got {self.tolerance}")

    def _check_size(self) -> None:
        if isinstance(self.architecture, Auto) and len(self.size) != 3:
            raise ConfigError(
                "Segmentation's network is planned for volumes: its size must be 3 lengths, the most that a patch may "
                f"have, got {list(self.size)}"
            )
        axes, of = len(self.size), str(self.multiple)
        multiples = self.architecture.multiples(axes) if axes in (2, 3) else None
        if multiples and len(set(multiples)) > 1:
            of = ", ".join(map(str, multiples))
        if not multiples or any(one < step or one % step for one, step in zip(self.size, multiples, strict=True)):
            raise ConfigError(
                f"Segmentation's size must be 2 multiples of {of} for {self.architecture}, or 3 for patches of "
                f"volumes, got {list(self.size)}"
            )

    @property
    def offered(self) -> tuple[MaskMetric, ...]:
        return mask_metrics(self.spacing, self.tolerance)

    def metric(self, name: str) -> Metric:
        return of_one_class(name, (Dice(), *self.offered)) or super().metric(name)

    @property
    def multiple(self) -> int:
        """What height and width must be multiples of."""
        found = self.architecture.multiple
        if found is None:
            raise ConfigError(f"Segmentation needs a network that segments, such as UNet, got {self.architecture}")
        return found

    @property
    def spec(self) -> Spec:
        forms = ("volumes", "images") if len(self.size) == 2 else ("volumes",)
        return Spec(Target.MASK, forms, self.size, self.spacing, self.multiple, self.intensity, patches=self.patches)

    def plan(self, hospitals: Sequence[Fingerprint]) -> Planned:
        return make_plan(hospitals, self.size).told()

    def as_planned(self, plan: Planned) -> "Segmentation":
        assert isinstance(self.architecture, Auto)
        if any(length > most for length, most in zip(plan.size, self.size, strict=True)):
            raise ConfigError(f"the planned patch {list(plan.size)} is larger than the job's size {list(self.size)}")
        network = architecture_of(plan, self.architecture)
        return dataclasses.replace(self, size=plan.size, spacing=plan.spacing, architecture=network)

    def network(self, data: SiteData) -> nn.Module:
        return self.architecture.build(data.input_shape, len(data.class_names))

    def present(self, samples: Samples, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        whole = isinstance(samples.inputs, CaseRows)
        draw = draw_patches if whole else super().present
        inputs, masks = draw(samples, chosen, generator)
        inputs, moved = augmented(self.augment, inputs, masks, generator)
        assert moved is not None
        return inputs, moved

    @property
    def augments(self) -> bool:
        return bool(self.augment)

    @property
    def shows_as_they_are(self) -> bool:
        return not self.augments and type(self).present is Segmentation.present

    @property
    def tiled(self) -> bool:
        """Whether whole cases are predicted window by window, each of the ``size``."""
        return self.spec.whole or self.architecture.fixed

    def infer(self, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        def mirrored(given: Tensor) -> Tensor:
            return flipped(forward, given, self.flips, back=True)

        return slide(mirrored, inputs, self.size) if self.tiled else mirrored(inputs)

    def decide(self, outputs: Tensor) -> Tensor:
        """Classes, N x ..., uint8; ``UNDECIDED`` where an output is no number."""
        return undecided(outputs, outputs.argmax(dim=1).to(torch.uint8))
