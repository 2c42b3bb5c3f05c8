# SPDX-License-Identifier: Apache-2.0
"""Volumes: NIfTI files or DICOM series with label maps, listed in MONAI's Decathlon datalist format."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from medpfl.core.errors import DataError
from medpfl.data.declared import SPLITS, Case, Dataset, Item, LabelMap, Listing, Problems, SplitRule
from medpfl.data.samples import Budget, Samples, SiteData, Store, empty_like, in_parallel
from medpfl.data.splits import check_listing, choose
from medpfl.data.volumes.dicom import check_series

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

    def _listed(self, path: Path, content: dict[str, Any], split: str, problems: Problems) -> list[VolumeCase]:
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

    def slices(self, spacing: tuple[float, float, float], size: tuple[int, int]) -> SiteData:
        """All axial slices: RAS orientation, resampled to ``spacing`` (mm), centred crop or pad of the first two axes
        to ``size``, intensities of each volume's every channel with mean 0 and deviation 1. A channel of one value, as
        where a sequence is lacking, is 0.

        Raises:
            DataError: with the file, expected and got.
        """
        budget = Budget(self._storage, self._folder)
        splits: dict[str, Samples] = {}
        channels: int | None = None
        for split, cases in self.cases(Problems()).items():
            if not cases:
                splits[split] = empty_like(splits["train"])
                continue
            inputs, targets = Store(budget), Store(budget)
            depth: list[int] = []
            for case, item in zip(cases, in_parallel(self.read, cases), strict=True):
                channels = channels or len(item.image)
                if len(item.image) != channels:
                    raise DataError(
                        f"{case.where}: expected {channels} channels as in the others, got {len(item.image)}"
                    )
                assert item.affine is not None and isinstance(item.target, np.ndarray)
                inputs.append(prepare(item.image, item.affine, spacing, size).permute(3, 0, 1, 2))
                targets.append(prepare_label(item.target, item.affine, spacing, size).permute(2, 0, 1))
                depth.append(len(inputs) - sum(depth))
            names = [case.name for case in cases]
            case_of = np.repeat(np.arange(len(cases)), depth)
            splits[split] = Samples(inputs.finish(), targets.finish(), case_of, names, len(self.labels))
        return SiteData(splits, self.names())


def read_image(*files: Path, finite: bool = True) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """An image, CHWD, and its affine (4 x 4, voxel to mm, RAS); several files are stacked as channels.

    Args:
        finite: refuse NaN and infinity.

    Raises:
        DataError: a file is missing or broken, holds no volume, no voxels, no usable geometry, or NaN.
    """
    from monai.data import MetaTensor, NibabelReader, PydicomReader
    from monai.transforms import EnsureChannelFirst

    parts: list[tuple[NDArray[np.float32], NDArray[np.float64]]] = []
    for file in files:
        if file.is_dir():
            check_series(file)
        elif not file.is_file():
            raise DataError(f"{file}: no such file")
        try:
            reader = PydicomReader() if file.is_dir() or file.suffix.lower() == ".dcm" else NibabelReader()
            values, meta = reader.get_data(reader.read(str(file)))
            image = EnsureChannelFirst()(MetaTensor(torch.from_numpy(values.astype(np.float32)), meta=meta))
        except Exception as error:  # readers raise anything on a broken file; the sentence keeps the cause
            cause = error.__cause__ or error
            raise DataError(f"{file}: cannot be read as an image: {type(cause).__name__}: {cause}") from error
        array, affine = image.as_tensor().numpy(), image.affine.double().numpy()
        if array.ndim != 4:
            raise DataError(f"{file}: expected a volume with 3 axes, got {array.ndim - 1}")
        if not min(array.shape):
            raise DataError(f"{file}: holds no voxels, its shape is {array.shape[1:]}")
        if finite and not np.isfinite(array).all():
            raise DataError(f"{file}: holds values that are not finite")
        sizes = np.linalg.norm(affine[:3, :3], axis=0)
        if not np.isfinite(affine).all() or not abs(np.linalg.det(affine[:3, :3])) > 1e-9 * sizes.prod() > 0:
            raise DataError(f"{file}: its header has no usable geometry (affine {affine[:3].tolist()})")
        if parts:
            if array.shape[1:] != parts[0][0].shape[1:]:
                expected = parts[0][0].shape[1:]
                raise DataError(f"{file}: expected the shape of {files[0].name}, {expected}, got {array.shape[1:]}")
            same_place(file, files[0], array.shape[1:], parts[0][1], affine)
        parts.append((array, affine))
    return np.concatenate([array for array, _ in parts]), parts[0][1]


def prepare(
    image: NDArray[Any], affine: NDArray[np.float64], spacing: tuple[float, float, float], size: tuple[int, int] | None
) -> Tensor:
    """An image on the task's grid, CHWD float32 (a MetaTensor that knows its affine); ``size`` None: no crop or pad."""
    from monai.data import MetaTensor
    from monai.transforms import NormalizeIntensity, Spacing

    turned = _oriented(MetaTensor(torch.from_numpy(image), affine=torch.from_numpy(affine)))
    prepared: Tensor = _cropped(
        NormalizeIntensity(channel_wise=True)(Spacing(pixdim=spacing, mode="bilinear")(turned)), size
    )
    return prepared


def prepare_label(
    label: NDArray[np.uint8],
    affine: NDArray[np.float64],
    spacing: tuple[float, float, float],
    size: tuple[int, int] | None,
) -> Tensor:
    """A label map on the task's grid, HWD uint8."""
    from monai.data import MetaTensor
    from monai.transforms import Spacing

    turned = _oriented(MetaTensor(torch.from_numpy(label)[None].float(), affine=torch.from_numpy(affine)))
    cropped: Any = _cropped(Spacing(pixdim=spacing, mode="nearest")(turned), size)
    values: Tensor = cropped.as_tensor()[0].to(torch.uint8)
    return values


def _oriented(image: Any) -> Any:
    from monai.transforms import Orientation

    return Orientation(axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S")))(image)


def _cropped(image: Any, size: tuple[int, int] | None) -> Any:
    from monai.transforms import ResizeWithPadOrCrop

    return image if size is None else ResizeWithPadOrCrop(spatial_size=(*size, -1))(image)


def _datalist(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the datalist {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("training"), list):
        raise DataError(f"{path}: expected a Decathlon datalist with a list 'training'")
    return content


def same_place(
    label: Path, image: Path, shape: tuple[int, ...], place: NDArray[np.float64], other: NDArray[np.float64]
) -> None:
    """Refuse a label map that its header puts elsewhere than its image.

    A shifted or mirrored label map would train the model on the wrong voxels without a word. Rounding in the headers
    is no reason: up to half a voxel at any corner passes, and the image's affine counts.
    """
    ends = [np.array([0.0, length - 1.0]) for length in shape]
    corners = np.stack([axis.ravel() for axis in np.meshgrid(*ends, indexing="ij")] + [np.ones(8)])
    apart = float(np.linalg.norm(((place - other) @ corners)[:3], axis=0).max())
    if not apart <= 0.5 * float(np.linalg.norm(place[:3, :3], axis=0).min()):
        raise DataError(
            f"{label}: its geometry (affine) does not fit that of {image.name}: they lie up to {apart:.3g} mm apart"
        )
