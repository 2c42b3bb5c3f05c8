# SPDX-License-Identifier: Apache-2.0
"""Volumes: NIfTI files or DICOM series with label maps, listed in MONAI's Decathlon datalist format."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from medpfl.component import spec_of
from medpfl.core.errors import DataError
from medpfl.data.cache import How, PreparedCases
from medpfl.data.contract import Case, Dataset, Item, Listing
from medpfl.data.declared import SPLITS, LabelMap, Problems, SplitRule
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.samples import Budget, CaseStore, Samples, SiteData, Store, empty_like, in_parallel
from medpfl.data.splits import check_listing, choose
from medpfl.data.target import Target
from medpfl.data.volumes.new import VolumesPreparation
from medpfl.data.volumes.prepare import prepare, prepare_label, read_image, same_place

_ALONE = (".nii", ".nii.gz", ".mgh", ".mgz", ".dcm")
"""Files that are a whole volume; others may have their geometry in another file, which is not listed and may change."""
_LISTS = {"train": ("training",), "validation": ("validation",), "test": ("test", "testing")}


@dataclass(frozen=True)
class VolumeCase(Case):
    """One listed volume. ``images``: a file or DICOM folder for each channel; ``part``: what names its split."""

    images: tuple[Path, ...]
    label: Path
    part: str = ""


class Volumes(LabelMap, Dataset):
    """Images with label maps, listed in MONAI's Decathlon datalist format.

    The datalist's ``training``, ``validation`` and ``test`` (or ``testing``) lists are used as they are; entries
    without a label are left out of validation and test. If only ``training`` has labels, ``split`` cuts it. Its items
    are ``{"image": path or list of paths, "label": path, ...}``, paths relative to the datalist; a path that is a
    folder is a DICOM series.
    """

    form: ClassVar[str] = "volumes"
    targets: ClassVar[tuple[Target, ...]] = (Target.MASK,)
    preparation: ClassVar[type[Preparation]] = VolumesPreparation
    agreed: ClassVar[tuple[str, ...]] = ("labels",)

    kind: Literal["volumes"]
    datalist: str
    split: SplitRule = Field(default=SplitRule(group="patient"))

    @model_validator(mode="after")
    def _no_strata(self) -> "Volumes":
        if self.split.stratify:
            raise ValueError("'stratify' needs one class a case; volumes have none to stratify by")
        return self

    def class_names(self) -> list[str]:
        return self.names()

    def cases(self, problems: Problems) -> Listing:
        """Raises DataError if the datalist itself cannot be read, whatever ``problems`` keeps."""
        path = Path(self._folder, self.datalist)
        content = _datalist(path)
        listed = {split: self._listed(path, content, split, problems) for split in SPLITS}
        if not listed["validation"] and not listed["test"]:
            cases = listed["train"]
            groups, places = [case.group for case in cases], [case.where for case in cases]
            parts = [case.part for case in cases]
            chosen = choose(self.split, places, problems, source=str(path), groups=groups, named=parts)
            listed = {split: [cases[index] for index in chosen[split]] for split in SPLITS}
        check_listing(listed, str(path), problems)
        return listed

    def _listed(self, path: Path, content: dict[str, object], split: str, problems: Problems) -> list[VolumeCase]:
        cases: list[VolumeCase] = []
        key = next((key for key in _LISTS[split] if key in content), _LISTS[split][0])
        items = content.get(key) or []
        if not isinstance(items, list):
            problems.add(f"{path}: '{key}' must be a list, got {items!r}")
            return cases
        for number, item in enumerate(items):
            where = f"{path}: {key}[{number}]"
            unlabelled = isinstance(item, str) or (isinstance(item, dict) and "label" not in item)
            if split != "train" and unlabelled:
                continue  # the Decathlon's own test lists have no labels
            images = item.get("image") if isinstance(item, dict) else None
            images = [images] if isinstance(images, str) else images
            if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
                problems.add(f"{where}: expected {{'image': file, 'label': file}}, got {item!r}")
                continue
            if not isinstance(item.get("label"), str):
                problems.add(f"{where}: 'label' is missing; training and testing need a label map")
                continue
            group = item.get(self.split.group) if self.split.group else None
            # An item without the group's field stands for itself: one volume a patient, the usual Decathlon list.
            name = images[0].removesuffix(".gz").removesuffix(".nii")
            files = tuple(Path(path.parent, image) for image in images)
            label = Path(path.parent, item["label"])
            part = str(item.get(self.split.column, "")) if self.split.column else ""
            cases.append(VolumeCase(name, str(group) if group is not None else name, where, files, label, part))
        return cases

    def read(self, case: VolumeCase) -> Item:
        """CHWD image as stored, HWD label map in declared values, and where they lie."""
        image, place = read_image(*case.images)
        label, other = read_image(case.label, finite=False)  # ``translate`` names a value that is not declared
        if label.shape != (1, *image.shape[1:]):
            shape = tuple(label.shape[1:]) if len(label) == 1 else (*label.shape[1:], len(label))
            raise DataError(
                f"{case.label}: the label map has shape {shape}, its image {case.images[0].name} {image.shape[1:]}"
            )
        same_place(case.label, case.images[0], image.shape[1:], place, other)
        return Item(image, self.translate(str(case.label), label[0]), place)

    def load(self, spec: Spec) -> SiteData:
        """All volumes, prepared as in ``prepared``: axial slices with a centred crop or pad of the first two axes to
        ``size``, or, where it has three lengths, whole volumes of any size.

        Raises:
            DataError: with the file, expected and got.
        """
        whole = len(spec.size) == 3
        budget = Budget(self._storage, self._folder)
        read = partial(self._cached, spec=spec, cache=PreparedCases(self._storage, self._folder))
        splits: dict[str, Samples] = {}
        channels: int | None = None
        for split, cases in self.cases(Problems()).items():
            if not cases:
                splits[split] = empty_like(splits["train"])
                continue
            inputs, targets = _stores(spec, budget)
            depth: list[int] = []
            for case, (image, label) in zip(cases, in_parallel(read, cases), strict=True):
                channels = channels or len(image)
                if len(image) != channels:
                    raise DataError(f"{case.where}: expected {channels} channels as in the others, got {len(image)}")
                inputs.append(image if whole else image.permute(3, 0, 1, 2))
                targets.append(label if whole else label.permute(2, 0, 1))
                depth.append(1 if whole else label.shape[2])
            names = [case.name for case in cases]
            case_of = np.repeat(np.arange(len(cases)), depth)
            owners = [case.group for case in cases]
            splits[split] = Samples(inputs.finish(), targets.finish(), case_of, names, len(self.labels), owners)
        return SiteData(splits, self.names(), VolumesPreparation())

    def prepared(self, case: VolumeCase, spec: Spec) -> tuple[Tensor, Tensor]:
        """A case in RAS orientation, resampled to ``spacing`` (mm), its intensities as ``intensity`` says: the image,
        CHWD float32, and its label map, HWD uint8.

        Raises:
            DataError: with the file, expected and got.
        """
        size = spec.plane() if len(spec.size) == 2 else None
        item = self.read(case)
        assert item.affine is not None and isinstance(item.target, np.ndarray)
        image: Any = prepare(item.image, item.affine, spec.spacing, size, spec.intensity)
        return image.as_tensor(), prepare_label(item.target, item.affine, spec.spacing, size)

    def _cached(self, case: VolumeCase, spec: Spec, cache: PreparedCases) -> tuple[Tensor, Tensor]:
        """``prepared``, from the cache if it is there."""

        files = (*case.images, case.label)
        if not all(file.is_dir() or file.name.endswith(_ALONE) for file in files):
            return self.prepared(case, spec)

        def prepare() -> dict[str, Tensor]:
            image, label = self.prepared(case, spec)
            return {"image": image, "label": label}

        kept = cache.get(files, self._how(spec), prepare)
        return kept["image"], kept["label"]

    def _how(self, spec: Spec) -> How:
        """All that ``prepared`` goes by, beside the files."""
        return {
            "kind": f"{type(self).__module__}.{type(self).__qualname__}",
            "spacing": list(spec.spacing),
            "size": list(spec.size) if len(spec.size) == 2 else [],
            "intensity": spec_of(spec.intensity),
            "labels": self.coding(),
        }


def _stores(spec: Spec, budget: Budget) -> tuple[Store, Store] | tuple[CaseStore, CaseStore]:
    """For inputs and targets."""
    if len(spec.size) == 3:
        return CaseStore(budget, spec.size), CaseStore(budget, spec.size)
    return Store(budget), Store(budget)


def _datalist(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the datalist {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("training"), list):
        raise DataError(f"{path}: expected a Decathlon datalist with a list 'training'")
    return content
