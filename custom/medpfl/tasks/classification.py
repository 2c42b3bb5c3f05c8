# SPDX-License-Identifier: Apache-2.0
"""Classification of images, scored by accuracy, balanced accuracy and AUC."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from medpfl.core.errors import ConfigError, DataError
from medpfl.data.arrays.declare import Arrays
from medpfl.data.arrays.prepare import new_rows
from medpfl.data.contract import NewCase
from medpfl.data.images.declare import Images
from medpfl.data.pixels import image_files, prepare, read_image
from medpfl.data.samples import SiteData
from medpfl.data.site_file import SiteFile
from medpfl.models.base import Architecture
from medpfl.models.resnet import ResNet
from medpfl.tasks.labelled import Labelled


@dataclass(frozen=True)
class Classification(Labelled):
    """One class an image. Loss: cross-entropy.

    Args:
        dataset: name of a declared dataset of kind ``images`` with ``label``, or ``arrays``.
        size: height and width in pixels to which every image is brought; for arrays of volumes their depth, height
            and width, which do not change.
        architecture: the network.
        score: metric that chooses the best round.
    """

    dataset: str
    size: tuple[int, ...] = (64, 64)
    architecture: Architecture = field(default_factory=ResNet)
    score: str = "balanced_accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", tuple(self.size))  # JSON has lists
        if len(self.size) not in (2, 3) or min(self.size) < 1:
            raise ConfigError(f"Classification's size must be 2 or 3 lengths of at least 1, got {list(self.size)}")

    def load(self, site_file: SiteFile) -> SiteData:
        dataset = site_file.dataset(self.dataset, Images, Arrays)
        if isinstance(dataset, Images):
            return dataset.load(self._plane(), "label")
        assert isinstance(dataset, Arrays)
        return dataset.load(self.size)

    def network(self, data: SiteData) -> nn.Module:
        return self.architecture.build(tuple(data.splits["train"].inputs.shape[1:]), self.outputs(data.class_names))

    def new_cases(self, path: Path, preparation: dict[str, Any]) -> Iterator[NewCase]:
        """An image file or a folder of images; for a model trained on arrays, an .npz file."""
        if "kind" not in preparation:  # arrays are prepared at each hospital; a model of all has no such thing
            raise DataError(f"{path}: cannot be prepared: the model's file has no hospital's preparation of its inputs")
        if preparation["kind"] == "arrays":
            for name, inputs in new_rows(path, preparation, self.size):
                yield NewCase(name, inputs)
            return
        for file in image_files(path):
            image = prepare(read_image(file, preparation["channels"]), self._plane())
            yield NewCase(str(file.relative_to(path)) if path.is_dir() else file.name, image[None])

    def _plane(self) -> tuple[int, int]:
        if len(self.size) != 2:
            sentence = f"the task's size {list(self.size)} does not fit images, which have height and width"
            raise DataError(sentence, public=sentence)
        return self.size[0], self.size[1]
