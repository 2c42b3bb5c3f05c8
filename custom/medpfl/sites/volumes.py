# SPDX-License-Identifier: Apache-2.0
"""Read declared volumes: NIfTI images with label maps, brought to one orientation, spacing and intensity scale."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medpfl.core.errors import DataError
from medpfl.sites.site_file import SPLITS, Volumes
from medpfl.sites.splits import split_indices


@dataclass(frozen=True)
class Case:
    """One listed volume: its files and whose it is."""

    name: str
    image: Path
    label: Path
    group: str


@dataclass(frozen=True)
class Volume:
    """A volume read for training. ``image``: CHWD float32; ``label``: HWD uint8."""

    name: str
    image: Tensor
    label: Tensor


def list_cases(dataset: Volumes) -> dict[str, list[Case]]:
    """The cases of each split, in the datalist's order.

    Raises:
        DataError: the datalist cannot be read, an entry is malformed, or a needed split is empty.
    """
    path = Path(dataset._folder, dataset.datalist)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the datalist {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("training"), list):
        raise DataError(f"{path}: expected a Decathlon datalist with a list 'training'")
    listed = {
        "train": _cases(path, content, "training", dataset),
        "validation": _cases(path, content, "validation", dataset),
        "test": _cases(path, content, "test", dataset),
    }
    if not listed["validation"] and not listed["test"]:
        cases = listed["train"]
        try:
            chosen = split_indices(dataset.split, len(cases), groups=[case.group for case in cases])
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        listed = {split: [cases[index] for index in chosen[split]] for split in SPLITS}
    for split in ("train", "test"):
        if not listed[split]:
            raise DataError(f"{path}: the {split} split is empty")
    owner: dict[str, str] = {}
    for split, cases in listed.items():
        for case in cases:
            if owner.setdefault(case.group, split) != split:
                raise DataError(f"{path}: '{case.group}' is in the {owner[case.group]} split and in the {split} split")
    return listed


def _cases(path: Path, content: dict[str, Any], key: str, dataset: Volumes) -> list[Case]:
    cases = []
    items = content.get(key) or []
    if not isinstance(items, list):
        raise DataError(f"{path}: '{key}' must be a list, got {items!r}")
    for number, item in enumerate(items):
        where = f"{path}: {key}[{number}]"
        if not isinstance(item, dict) or not isinstance(item.get("image"), str):
            raise DataError(f"{where}: expected {{'image': file, 'label': file}}, got {item!r}")
        if not isinstance(item.get("label"), str):
            raise DataError(f"{where}: 'label' is missing; training and testing need a label map")
        group = item.get(dataset.split.group) if dataset.split.group else None
        # An item without the group's field stands for itself: one volume a patient, the usual Decathlon list.
        image = Path(path.parent, item["image"])
        name = item["image"].removesuffix(".gz").removesuffix(".nii")
        cases.append(Case(name, image, Path(path.parent, item["label"]), str(group) if group is not None else name))
    return cases


def read_volume(case: Case, classes: int, spacing: tuple[float, float, float], size: tuple[int, int]) -> Volume:
    """Read one case: RAS orientation, resampled to ``spacing`` (mm), centred crop or pad of the first two axes to
    ``size``, intensities with mean 0 and deviation 1.

    Raises:
        DataError: with the file, expected and got.
    """
    from monai.transforms import (
        Compose,
        EnsureChannelFirst,
        LoadImage,
        NormalizeIntensity,
        Orientation,
        ResizeWithPadOrCrop,
        Spacing,
    )

    loaded = {}
    for kind, file in (("image", case.image), ("label", case.label)):
        if not file.is_file():
            raise DataError(f"{file}: no such file")
        try:
            loaded[kind] = Compose([LoadImage(image_only=True, dtype=np.float32), EnsureChannelFirst()])(str(file))
        except Exception as error:  # readers raise anything on a broken file; the sentence keeps the cause
            cause = error.__cause__ or error
            raise DataError(f"{file}: cannot be read as an image: {type(cause).__name__}: {cause}") from error
    image, label = loaded["image"], loaded["label"]
    if image.ndim != 4:
        raise DataError(f"{case.image}: expected a volume with 3 axes, got {image.ndim - 1}")
    if label.shape != (1, *image.shape[1:]):
        shape = tuple(label.shape[1:]) if len(label) == 1 else (*label.shape[1:], len(label))
        raise DataError(
            f"{case.label}: the label map has shape {shape}, its image {case.image.name} {tuple(image.shape[1:])}"
        )
    if not min(image.shape):
        raise DataError(f"{case.image}: holds no voxels, its shape is {tuple(image.shape[1:])}")
    _same_place(case, image, label)
    if not torch.isfinite(image).all():
        raise DataError(f"{case.image}: holds values that are not finite")
    values = torch.unique(label.as_tensor())
    wrong = [value for value in values.tolist() if value not in range(classes)]
    if wrong:
        raise DataError(f"{case.label}: label value {wrong[0]:g} is not declared; expected 0 to {classes - 1}")
    crop = ResizeWithPadOrCrop(spatial_size=(*size, -1))
    orient = Orientation(axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S")))
    image = crop(NormalizeIntensity()(Spacing(pixdim=spacing, mode="bilinear")(orient(image))))
    label = crop(Spacing(pixdim=spacing, mode="nearest")(orient(label)))
    return Volume(case.name, image.as_tensor().contiguous(), label.as_tensor()[0].to(torch.uint8).contiguous())


def _same_place(case: Case, image: Any, label: Any) -> None:
    """Refuse a label map that its header puts elsewhere than its image, and give it the image's affine.

    A shifted or mirrored label map would train the model on the wrong voxels without a word. Rounding in the headers
    is no reason: up to half a voxel at any corner passes.
    """
    place, other = image.affine.double(), label.affine.double()
    sizes = place[:3, :3].norm(dim=0)
    if not torch.isfinite(place).all() or place[:3, :3].det().abs() < 1e-9 * sizes.prod() or not sizes.min() > 0:
        raise DataError(f"{case.image}: its header has no usable geometry (affine {place[:3].tolist()})")
    ends = [torch.tensor([0.0, length - 1.0], dtype=torch.float64) for length in image.shape[1:]]
    corners = torch.cat([torch.cartesian_prod(*ends), torch.ones(8, 1, dtype=torch.float64)], dim=1)
    apart = float(((place - other) @ corners.T)[:3].norm(dim=0).max())
    if not apart <= 0.5 * float(sizes.min()):
        raise DataError(
            f"{case.label}: its geometry (affine) does not fit that of {case.image.name}: they lie up to {apart:.3g} "
            "mm apart"
        )
    label.affine = image.affine
