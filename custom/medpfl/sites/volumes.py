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
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
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
        chosen = split_indices(dataset.split, len(cases), groups=[case.group for case in cases])
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
    for number, item in enumerate(content.get(key) or []):
        where = f"{path}: {key}[{number}]"
        if not isinstance(item, dict) or not isinstance(item.get("image"), str):
            raise DataError(f"{where}: expected {{'image': file, 'label': file}}, got {item!r}")
        if not isinstance(item.get("label"), str):
            raise DataError(f"{where}: 'label' is missing; training and testing need a label map")
        group = item.get(dataset.split.group) if dataset.split.group else None
        # An item without the group's field stands for itself: one volume a patient, the usual Decathlon list.
        image = Path(path.parent, item["image"])
        name = image.name.removesuffix(".gz").removesuffix(".nii")
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
    if image.shape[1:] != label.shape[1:]:
        raise DataError(
            f"{case.label}: the label map has shape {tuple(label.shape[1:])}, its image {case.image.name} "
            f"{tuple(image.shape[1:])}"
        )
    if image.ndim != 4:
        raise DataError(f"{case.image}: expected a volume with 3 axes, got {image.ndim - 1}")
    if not torch.isfinite(image).all():
        raise DataError(f"{case.image}: holds values that are not finite")
    values = torch.unique(label.as_tensor())
    wrong = [value for value in values.tolist() if value != int(value) or not 0 <= value < classes]
    if wrong:
        raise DataError(f"{case.label}: label value {wrong[0]:g} is not declared; expected 0 to {classes - 1}")
    crop = ResizeWithPadOrCrop(spatial_size=(*size, -1))
    orient = Orientation(axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S")))
    image = crop(NormalizeIntensity()(Spacing(pixdim=spacing, mode="bilinear")(orient(image))))
    label = crop(Spacing(pixdim=spacing, mode="nearest")(orient(label)))
    if image.shape[1:] != label.shape[1:]:
        raise DataError(f"{case.label}: its geometry (affine) does not fit that of {case.image.name}")
    return Volume(case.name, image.as_tensor().contiguous(), label.as_tensor()[0].to(torch.uint8).contiguous())
