# SPDX-License-Identifier: Apache-2.0
"""Volumes: NIfTI files or DICOM series with label maps, a class each, or both, listed in MONAI's Decathlon datalist
format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue, field_validator, model_validator

from medpfl.component import spec_of
from medpfl.core.errors import DataError
from medpfl.data.cache import How, PreparedCases
from medpfl.data.cells import PLACE, Written, joined, read_cells
from medpfl.data.contract import Case, Dataset, Item, Listing
from medpfl.data.declared import SPLITS, LabelColumn, LabelMap, Problems, SplitRule, canonical
from medpfl.data.fingerprint import Fingerprint
from medpfl.data.outcome import empty
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.samples import Budget, Samples, SiteData, Store, empty_like, in_parallel, stores
from medpfl.data.splits import Groups, check_listing, choose
from medpfl.data.subgroups import Described
from medpfl.data.target import Target
from medpfl.data.volumes.datalist import check_lists, fields, labelled_items, no_field, other_field, read_datalist
from medpfl.data.volumes.fingerprint import fingerprint
from medpfl.data.volumes.foreground import fitted
from medpfl.data.volumes.new import VolumesPreparation
from medpfl.data.volumes.nifti import says_place
from medpfl.data.volumes.prepare import prepare, prepare_label, read_image, resized, same_place
from medpfl.data.volumes.structures import is_structure_set, read_structures, structures_of

if TYPE_CHECKING:
    from torch import Tensor

_ALONE = (".nii", ".nii.gz", ".mgh", ".mgz", ".dcm", ".nrrd", ".mha")
"""Files that are a whole volume; others may have their geometry in another file, which is not listed and may change."""
_PATIENT = "patient"


@dataclass(frozen=True)
class VolumeCase(Case):
    """One listed volume. ``images``: a file or DICOM folder for each channel; ``label``: its label map, None without;
    ``value``: class index, -1 without classes; ``part``: what names its split; ``marks``: its fields that ``subgroups``
    names."""

    images: tuple[Path, ...]
    label: Path | None
    part: str = ""
    value: int = -1
    marks: Mapping[str, str] = field(default_factory=dict, compare=False)


class VolumeTable(Written):
    """A table (CSV, or TSV or Parquet by its suffix) with one row a volume. ``image``: the column with the (first)
    image file, as the datalist names it."""

    file: str
    image: str


class Volumes(LabelMap, Described, Dataset):
    """Images with label maps (``labels``), a class each (``label``), or both, listed in MONAI's Decathlon datalist
    format.

    The class's column is a field of the datalist's items, or a column of ``table``. The datalist's ``training``,
    ``validation`` and ``test`` (or ``testing``) lists are used as they are; entries without a label are left out of
    validation and test. If only ``training`` has labels, ``split`` cuts it. Its items are ``{"image": path or list of
    paths, "label": path, ...}``, paths relative to the datalist; a path that is a folder is a DICOM series. Label maps
    that are DICOM segmentations or structure sets: ``structures`` says which label a name in them is; where several
    overlap, the one that is named last counts. Without it a segment's number is its value, and a region's name its
    label's.
    """

    form: ClassVar[str] = "volumes"
    targets: ClassVar[tuple[Target, ...]] = (Target.MASK, Target.CLASS)
    preparation: ClassVar[type[Preparation]] = VolumesPreparation
    agreed: ClassVar[tuple[str, ...]] = ("labels",)

    kind: Literal["volumes"]
    datalist: str
    labels: dict[int, str] = Field(default={})
    structures: dict[str, int] = Field(default={})
    label: LabelColumn | None = None
    table: VolumeTable | None = None
    split: SplitRule = Field(default=SplitRule(group=_PATIENT))

    @field_validator("labels")
    @classmethod
    def _several(cls, labels: dict[int, str]) -> dict[int, str]:
        if len(labels) == 1:
            raise ValueError(f"expected at least 2 values, got {sorted(labels)}")
        return labels

    @model_validator(mode="after")
    def _consistent(self) -> Volumes:
        if not self.labels and self.label is None:
            raise ValueError("expected 'labels' (of label maps), 'label' (a class for every volume) or both")
        for name, value in self.structures.items():
            if value not in sorted(self.labels)[1:]:
                raise ValueError(f"structures: '{name}' is mapped to {value}; expected a label but the first")
            if self.annotated is not None and self.labels[value] not in self.annotated:
                raise ValueError(f"structures: '{name}' is {self.labels[value]}, which 'annotated' does not name")
        if self.split.stratify and self.label is None:
            raise ValueError("'stratify' needs one class a case; these volumes have none to stratify by")
        if self.table and self.label is None:
            raise ValueError(
                "'table' has the classes of volumes, and there is no 'label'; leave one out or add the other"
            )
        return self

    @property
    def target(self) -> Target:
        return Target.CLASS if self.label else Target.MASK

    def class_names(self) -> list[str]:
        """The label's, else the label maps'."""
        return list(self.label.classes) if self.label else self.names()

    def cases(self, problems: Problems) -> Listing:
        """Raises DataError if the datalist itself cannot be read, whatever ``problems`` keeps."""
        path = Path(self._folder, self.datalist)
        content = read_datalist(path)
        check_lists(path, content, self._needed(), problems)
        # Without the usual field each item stands for itself; who names another one has it.
        if (group := self._owner) not in (None, _PATIENT, *fields(content)):
            problems.add(no_field(path, content, str(group), "split.group"))
        if group == _PATIENT and (other := other_field(content, _PATIENT)):
            problems.add(
                f"{path}: '{other}' says whose its items are, and there is no '{_PATIENT}', so that every volume would "
                f"be a patient of its own; declare 'split: {{group: {other}}}'"
            )
        classes, named = self._tabled(problems), Groups()
        listed = {split: self._listed(path, content, split, classes, named, problems) for split in SPLITS}
        if not listed["validation"] and not listed["test"]:
            cases = listed["train"]
            groups, places = [case.group for case in cases], [case.where for case in cases]
            if self.split.stratify and (several := [name for name, count in Counter(groups).items() if count > 1]):
                problems.add(
                    f"{path}: 'stratify' cuts volume by volume, and '{several[0]}' has several; leave it out, so that "
                    "they stay in one split"
                )
            parts, values = [case.part for case in cases], [case.value for case in cases]
            chosen = choose(self.split, places, problems, source=str(path), groups=groups, classes=values, named=parts)
            listed = {split: [cases[index] for index in chosen[split]] for split in SPLITS}
        elif self.split.file:
            problems.add(f"{path}: it has a list of each split, so 'split.file' has no meaning; leave it out")
        check_listing(listed, str(path), problems)
        return listed

    @property
    def _owner(self) -> str | None:
        """The field that says whose an item is: the usual one where ``split`` does not say another one or null."""
        return self.split.group if "group" in self.split.model_fields_set else _PATIENT

    def _tabled(self, problems: Problems) -> dict[str, str]:
        """Image file to what the table says in the class's column."""
        if self.table is None or self.label is None:
            return {}
        path, wanted = Path(self._folder, self.table.file), [self.table.image, self.label.column]
        frame = joined(read_cells(path, path.name, self.table.of_cases(), problems, wanted)).fillna("")
        found: dict[str, str] = {}
        for place, image, value in zip(frame[PLACE], frame[wanted[0]], frame[wanted[1]], strict=True):
            if image in found:
                problems.add(f"{path.name}:{place}: the image '{image}' has another row")
            found[str(image)] = str(value)
        return found

    def _value(
        self, item: dict[str, object], image: str, classes: dict[str, str], where: str, problems: Problems
    ) -> int | None:
        """An item's class; None where there is none, which was told."""
        if self.label is None:
            return -1
        value = classes.get(image, "") if self.table else str(item.get(self.label.column, ""))
        index = self.label.index().get(canonical(value))
        if index is None and self.table and image not in classes:
            problems.add(f"{where}: the image '{image}' has no row in {self.table.file}")
        elif index is None:
            problems.add(
                f"{where}: '{self.label.column}': '{value}' is not among the declared values ({self.label.declared()})"
            )
        return index

    def _listed(
        self,
        path: Path,
        content: dict[str, object],
        split: str,
        classes: dict[str, str],
        named: Groups,
        problems: Problems,
    ) -> list[VolumeCase]:
        cases: list[VolumeCase] = []
        for where, item in labelled_items(path, content, split, self._needed(), problems):
            images = item.get("image") if isinstance(item, dict) else None
            images = [images] if isinstance(images, str) else images
            if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
                problems.add(f"{where}: expected {{'image': file, 'label': file}}, got {item!r}")
                continue
            assert isinstance(item, dict)
            if self.labels and not isinstance(item.get("label"), str):
                problems.add(f"{where}: 'label' is missing; training and testing need a label map")
                continue
            group = item.get(self._owner) if self._owner else None
            # An item without the group's field stands for itself: one volume a patient, the usual Decathlon list.
            if group is not None and empty(group):
                problems.add(f"{where}: '{self._owner}' is empty; leave it out where an item is a patient of its own")
                continue
            name = images[0].removesuffix(".gz").removesuffix(".nii")
            files = tuple(Path(path.parent, image) for image in images)
            label = Path(path.parent, item["label"]) if self.labels else None
            if (value := self._value(item, images[0], classes, where, problems)) is None:
                continue
            part = str(item.get(self.split.column, "")) if self.split.column else ""
            group = named.named(str(group)) if group is not None else name
            marks = {key: str(item[key]) for key in self.described_by if item.get(key) is not None}
            cases.append(VolumeCase(name, group, where, files, label, part, value, marks))
        return cases

    def described(self) -> dict[str, dict[str, str]]:
        cases = [case for listed in self.cases(Problems(keep=True)).values() for case in listed]
        for column in self.described_by:
            if not any(column in case.marks for case in cases):
                path = Path(self._folder, self.datalist)
                raise DataError(no_field(path, read_datalist(path), column, "subgroups"))
        return {column: {case.name: case.marks.get(column, "") for case in cases} for column in self.described_by}

    def _needed(self) -> list[str]:
        """Fields that labelled items have beside their image."""
        return [*(["label"] if self.labels else []), *([self.label.column] if self.label and not self.table else [])]

    def read(self, case: VolumeCase) -> Item:
        """CHWD image as stored; its class, or its label map (HWD, in declared values) where no class is declared; and
        where it lies. A declared label map is read and checked in any case."""
        image, place = read_image(*case.images)
        mask = self._mask(case, image, place) if case.label else None
        target = mask if self.label is None and mask is not None else case.value
        return Item(image, target, place, all(says_place(file) for file in case.images))

    def _mask(self, case: VolumeCase, image: NDArray[Any], place: NDArray[np.float64]) -> NDArray[np.uint8]:
        """An image's label map, HWD in declared values."""
        assert case.label is not None
        if file := structures_of(case.label):
            return self._drawn(file, case.images[0], image.shape[1:], place)
        label, other = read_image(case.label, finite=False)  # ``translate`` names a value that is not declared
        if label.shape != (1, *image.shape[1:]):
            shape = tuple(label.shape[1:]) if len(label) == 1 else (*label.shape[1:], len(label))
            raise DataError(
                f"{case.label}: the label map has shape {shape}, its image {case.images[0].name} {image.shape[1:]}"
            )
        same_place(case.label, case.images[0], image.shape[1:], place, other)
        return self.translate(str(case.label), label[0])

    def _drawn(self, file: Path, image: Path, shape: tuple[int, ...], place: NDArray[np.float64]) -> NDArray[np.uint8]:
        """The label map of a DICOM segmentation or structure set."""
        wanted = self.structures
        if not wanted and is_structure_set(file):
            shown = self.shown() or range(1, len(self.labels))
            wanted = {self.labels[value]: value for value in shown}
        found = read_structures(file, image, shape, place, wanted)
        return found.astype(np.uint8) if wanted else self.translate(str(file), found)

    def fingerprint(self) -> Fingerprint:
        if not self.labels:
            sentence = "a network is planned for segmentation; the dataset declares no 'labels'"
            raise DataError(f"{self.datalist}: {sentence}", public=sentence)
        return fingerprint(self, self.datalist, len(self.labels))

    def load(self, spec: Spec) -> SiteData:
        """All volumes, prepared as in ``prepared``: axial slices with a centred crop or pad of the first two axes to
        ``size``, or whole ones for patches, or, where it has three lengths, whole volumes of any size. To be
        classified: volumes brought to three lengths.

        Raises:
            DataError: with the file, expected and got; or the dataset declares no such target.
        """
        classified = spec.target is Target.CLASS
        if not (self.label if classified else self.labels):
            key = "label" if classified else "labels"
            sentence = f"the job's task needs volumes with '{key}', which the dataset does not declare"
            raise DataError(f"{self._folder / self.datalist}: {sentence}", public=sentence)
        if not spec.partly and not classified:
            self.refuse_partly(self.datalist)
        budget = Budget(self._storage, self._folder)
        cache = PreparedCases(self._storage, self._folder)
        splits: dict[str, Samples] = {}
        channels: int | None = None
        listing = self.cases(Problems())
        spec = self._fitted(spec, listing["train"], cache)
        read = partial(self._cached, spec=spec, cache=cache)
        names = list(self.label.classes) if classified and self.label else self.names()
        for split, cases in listing.items():
            if not cases:
                splits[split] = empty_like(splits["train"])
                continue
            inputs, targets = (Store(budget), Store(budget)) if classified else stores(spec, budget)
            depth: list[int] = []
            for case, (image, label) in zip(cases, in_parallel(read, cases), strict=True):
                channels = channels or len(image)
                if len(image) != channels:
                    raise DataError(f"{case.where}: expected {channels} channels as in the others, got {len(image)}")
                if len(spec.size) == 3:
                    inputs.append(image[None] if classified else image)
                    targets.append(label)
                    depth.append(1)
                    continue
                depth.append(label.shape[2])
                if spec.whole:
                    for place in range(label.shape[2]):
                        inputs.append(image[..., place])
                        targets.append(label[..., place])
                else:
                    inputs.append(image.permute(3, 0, 1, 2))
                    targets.append(label.permute(2, 0, 1))
            case_of = np.repeat(np.arange(len(cases)), depth)
            names_of = [case.name for case in cases]
            owners = [case.group for case in cases]
            shown = None if classified else self.shown()
            splits[split] = Samples(inputs.finish(), targets.finish(), case_of, names_of, len(names), shown, owners)
        return SiteData(splits, names, VolumesPreparation.of(spec))

    def _fitted(self, spec: Spec, cases: Sequence[VolumeCase], cache: PreparedCases) -> Spec:
        """With its intensities as the training part says, where they are to be fitted.

        Raises:
            DataError: there are no label maps, or no foreground in them.
        """
        if not spec.intensity.fits:
            return spec
        source = Path(self._folder, self.datalist)
        if not self.labels:
            sentence = (
                f"the job's {type(spec.intensity).__name__} needs label maps, and the dataset declares no 'labels'"
            )
            raise DataError(f"{source}: {sentence}", public=sentence)

        def read(case: VolumeCase) -> Item:
            image, place = read_image(*case.images)
            return Item(image, self._mask(case, image, place), place)

        return replace(spec, intensity=fitted(spec.intensity, in_parallel(read, cases), len(cases), source))

    def prepared(self, case: VolumeCase, spec: Spec) -> tuple[Tensor, Tensor]:
        """A case in RAS orientation, resampled to ``spacing`` (mm), its intensities as ``intensity`` says: the image,
        CHWD float32, and its label map, HWD uint8; to be classified, brought to ``size``, and its class, 1.

        Raises:
            DataError: with the file, expected and got.
        """
        import torch

        values, affine = read_image(*case.images)
        if spec.target is Target.CLASS:
            return resized(values, affine, spec.lengths(), spec.intensity), torch.tensor([case.value])
        size = None if spec.whole else spec.plane()
        image: Any = prepare(values, affine, spec.spacing, size, spec.intensity)
        return image.as_tensor(), prepare_label(self._mask(case, values, affine), affine, spec.spacing, size)

    def _cached(self, case: VolumeCase, spec: Spec, cache: PreparedCases) -> tuple[Tensor, Tensor]:
        """``prepared``, from the cache if it is there."""

        files = (*case.images, *([case.label] if case.label and spec.target is Target.MASK else []))
        if not all(file.is_dir() or file.name.endswith(_ALONE) for file in files):
            return self.prepared(case, spec)

        def prepare() -> dict[str, Tensor]:
            image, label = self.prepared(case, spec)
            return {"image": image, "label": label}

        kept = cache.get(files, self._how(spec, case), prepare, [type(self), type(spec.intensity)])
        return kept["image"], kept["label"]

    def _how(self, spec: Spec, case: VolumeCase) -> How:
        """All that ``prepared`` goes by, beside the files."""
        return {
            "kind": f"{type(self).__module__}.{type(self).__qualname__}",
            "target": str(spec.target),
            "spacing": list(spec.spacing),
            "size": [] if spec.whole else list(spec.size),
            "intensity": spec_of(spec.intensity),
            "labels": self.coding() if spec.target is Target.MASK else [case.value],
            "structures": self._named(),
        }

    def _named(self) -> list[JsonValue]:
        """The names that structures have in the files, and what they mean."""
        return [[name, value] for name, value in self.structures.items()] or list(self.names())

    def coding_of_masks(self) -> list[JsonValue]:
        return [self.coding(), self._named()] if self.labels else []
