# SPDX-License-Identifier: Apache-2.0
"""Volumes to predict: found in a file, a folder or a datalist, and segmentations written where the volumes lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from medpfl.core.errors import DataError
from medpfl.data.declared import Strict
from medpfl.data.geometry import geometry
from medpfl.data.intensity import Fixed
from medpfl.data.preparation import NewCase, Preparation, Row, Spec
from medpfl.data.readout import ByClass, Readout
from medpfl.data.target import Target
from medpfl.data.volumes.itk import ITK, is_itk
from medpfl.data.volumes.nifti import SUFFIXES as NIFTI
from medpfl.data.volumes.prepare import prepare, read_image, resized
from medpfl.data.volumes.write_segments import is_dicom, write_segments

if TYPE_CHECKING:
    from torch import Tensor

_FILES = (*NIFTI, ".mgh", ".mgz", ".img")
"""Of volumes that nibabel reads; an .img has its header in the .hdr beside it."""
_FRAMES = ".dcm"
"""Beside other volumes it is a multi-frame file; of a slice instead its reader says so."""


class Fitted(Strict):
    """Of the foreground of the training part, by channel; see ``Foreground``."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


class VolumesPreparation(Preparation):
    """Volumes are prepared by the task's own settings; ``fitted``: where they say so, with what was fitted here."""

    form: ClassVar[str] = "volumes"
    kind: Literal["volumes"] = "volumes"
    fitted: Fitted | None = None

    @classmethod
    def of(cls, spec: Spec) -> VolumesPreparation:
        """Of volumes that were prepared so.

        Args:
            spec: with intensities that are fitted, where they fit.
        """
        known = spec.intensity
        numbers = {name: getattr(known, name) for name in Fitted.model_fields} if isinstance(known, Fixed) else None
        return cls(fitted=Fitted(**numbers) if numbers else None)

    def spec_with(self, spec: Spec) -> Spec:
        """What a task wants, with the intensities as they were fitted.

        Raises:
            DataError: they should have been, and were not.
        """
        if not spec.intensity.fits:
            return spec
        if self.fitted is None:
            raise DataError(
                "the model's file does not hold its hospital's statistics of intensities, with which volumes are "
                "prepared: predict with a model's file from the hospital itself"
            )
        return replace(spec, intensity=Fixed(**self.fitted.model_dump()))

    def new_cases(self, path: Path, spec: Spec) -> Iterator[NewCase]:
        """NIfTI files and DICOM series; see ``find_volumes``."""
        spec = self.spec_with(spec)
        if spec.target is Target.CLASS:
            for name, files in find_volumes(path):
                image, affine = read_image(*files)
                yield NewCase(name, resized(image, affine, spec.lengths(), spec.intensity)[None])
            return
        for volume in read_new_volumes(path, spec):
            yield NewCase(volume.name, volume.inputs, volume.save, volume.as_dicom if volume.is_dicom() else None)

    def shared(self) -> dict[str, JsonValue]:
        return {"kind": self.kind}


def find_volumes(path: Path) -> list[tuple[str, tuple[Path, ...]]]:
    """Names and files of the volumes that a path means, sorted by name.

    Args:
        path: a volume's file; a folder that is a DICOM series; a folder of volumes' files and series; or a datalist
            (JSON), of which every list is taken.

    Raises:
        DataError: there are none, or two of one name.
    """
    if path.suffix == ".json":
        found = _listed(path)
    elif path.is_dir() and not _is_series(path):
        inner = [p for p in sorted(path.iterdir()) if _is_volume(p, _FRAMES) or (p.is_dir() and _is_series(p))]
        if series := [p for p in inner if p.is_dir()]:
            _refuse_deeper(path, series)
        found = [(_name(p), (p,)) for p in inner]
    elif path.exists():
        if path.is_dir():
            _refuse_beside(path)
        found = [(_name(path), (path,))]
    else:
        raise DataError(f"{path}: no such file")
    if not found:
        raise DataError(f"{path}: holds no volume ({', '.join((*_FILES, *ITK))}) and no folder with a DICOM series")
    names = [name for name, _ in found]
    for name, files in found:
        if names.count(name) > 1:
            raise DataError(f"{files[0]}: another volume would be written to '{name}' too; predict them one by one")
    return found


def _refuse_deeper(path: Path, series: list[Path]) -> None:
    """Raises DataError: a patient's slices lie a folder deeper than the others', and the patient would be left out."""
    for folder in sorted(p for p in path.iterdir() if p.is_dir() and p not in series and not p.name.startswith(".")):
        deeper = next((p for p in sorted(folder.iterdir()) if p.is_dir() and _is_series(p)), None)
        if deeper is not None:
            raise DataError(
                f"{deeper}: this DICOM series lies a folder deeper than {series[0].name}'s and would be left out; put "
                f"every series into a folder of its own right below {path}"
            )


def _refuse_beside(path: Path) -> None:
    """Raises DataError: a folder with DICOM files of its own has folders with series, too, which would be left out."""
    for folder in sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if _is_series(folder):
            raise DataError(
                f"{path}: holds DICOM files, and beside them folders with a DICOM series, such as '{folder.name}', "
                "which would be left out; put every series, and every multi-frame file, into a folder of its own"
            )


def _listed(path: Path) -> list[tuple[str, tuple[Path, ...]]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a datalist: {error}") from error
    found = []
    for key, items in content.items() if isinstance(content, dict) else ():
        named = [_images(item) for item in items] if isinstance(items, list) else []
        if any(named) and not all(named):
            raise DataError(f"{path}: {key}[{named.index([])}] names no 'image', and would be left out")
        for item, images in zip(items, named, strict=True) if any(named) else ():
            found.append((name_of_item(item), tuple(Path(path.parent, image) for image in images)))
    return sorted(found)


def _images(item: Any) -> list[str]:
    """The image files of a datalist's item, one a channel; empty if it names none."""
    images = item.get("image") if isinstance(item, dict) else item
    images = [images] if isinstance(images, str) else images
    return images if isinstance(images, list) and all(isinstance(image, str) for image in images) else []


def name_of_item(item: Any) -> str:
    """What a datalist's item is called, and its segmentation; empty for an item that names no image."""
    images = _images(item)
    # Without the dots of "./" and "../": a file whose name begins with one is hidden.
    return _name(Path(images[0].lstrip("./").replace("/", "_"))) if images else ""


def _name(path: Path) -> str:
    # Not resolve(): where data are links into a store, the link has the name and its target a hash.
    name = path.absolute().name
    for suffix in (".gz", *_FILES, _FRAMES):
        name = name[: -len(suffix)] if name.lower().endswith(suffix) else name
    return Path(name).stem if is_itk(path) else name


def _is_volume(path: Path, *more: str) -> bool:
    """A file that is a volume by its name, or has one of ``more`` suffixes."""
    named = path.name.lower().endswith((*_FILES, *more)) or is_itk(path)
    return path.is_file() and named and not path.name.startswith(".")


def _is_series(path: Path) -> bool:
    """A folder whose files are DICOM: the first of them, or any where none is a volume of its own. A text beside a
    patient's slices is told when they are read; the patient must not be left out for it."""
    from pydicom.misc import is_dicom

    files = [p for p in sorted(path.iterdir()) if p.is_file() and not p.name.startswith(".")]
    return any(map(is_dicom, files[:1] if any(map(_is_volume, files)) else files))


@dataclass(frozen=True)
class NewVolume:
    """A volume on the task's grid.

    Attributes:
        name: what its segmentation is called.
        inputs: its slices, D x C x H x W, padded as the network needs it; or the whole volume, 1 x C x H x W x D.
    """

    name: str
    inputs: Tensor
    _source: Path
    _affine: NDArray[np.float64]
    _shape: tuple[int, ...]
    _grid: NDArray[np.float64]
    _lengths: tuple[int, ...]
    _readout: Readout = ByClass()  # noqa: RUF009 (it is frozen)

    @geometry(True)
    def save(self, outputs: Tensor, folder: Path, class_names: list[str], probabilities: bool) -> Row:
        """Write ``<name>.nii.gz``: the class of every voxel of the input, in its geometry.

        Args:
            outputs: the network's, D x K x H x W, or 1 x K x H x W x D.
            probabilities: also write ``<name>_probabilities.nii.gz``, one volume a class (float32).

        Returns:
            The file and the volume of each class but the first, in ml.
        """
        import torch
        from monai.data import MetaTensor
        from monai.transforms import SpatialResample

        shares = self._readout.shares(outputs)
        shares = shares[0] if shares.ndim == 5 else shares.permute(1, 2, 3, 0)
        for axis, length in enumerate(self._lengths, start=1):
            shares = shares.narrow(axis, _before(length, shares.shape[axis]), length)
        # Where the grid ends before the input does, which may be by more than a voxel, the grid's edge counts: with
        # zeros there, nothing would be found in the outer voxels of a scan.
        back = SpatialResample(mode="bilinear", padding_mode="border")(
            MetaTensor(shares.contiguous(), affine=torch.from_numpy(self._grid)),
            dst_affine=torch.from_numpy(self._affine),
            spatial_size=self._shape,
        )
        values = back.as_tensor().numpy()
        classes = self._readout.classes(values)
        file, shown = folder / f"{self.name}.nii.gz", folder / f"{self.name}_probabilities.nii.gz"
        for target in (file, shown) if probabilities else (file,):
            if target.exists():
                raise DataError(
                    f"{self._source}: what is written of it would replace another volume's '{target.name}'; predict "
                    "them one by one"
                )
        _save(file, classes, self._affine, self._source)
        if probabilities:
            _save(shown, np.moveaxis(values, 0, -1), self._affine, self._source)
        millilitres = float(abs(np.linalg.det(self._affine[:3, :3]))) / 1000
        counts = np.bincount(classes.ravel(), minlength=len(class_names))
        volumes = {f"{name}_ml": round(counts[k] * millilitres, 4) for k, name in enumerate(class_names) if k}
        return {"file": file.name, **volumes}

    def is_dicom(self) -> bool:
        """Whether the input is a DICOM series or a multi-frame DICOM file."""
        return is_dicom(self._source)

    def as_dicom(self, written: Path, class_names: list[str]) -> str:
        """Write ``<name>.seg.dcm`` beside the NIfTI file that ``save`` wrote, and return its name.

        Raises:
            DataError: see ``write_segments``.
        """
        import nibabel as nib

        image: Any = nib.load(written)
        file = written.with_name(f"{self.name}.seg.dcm")
        write_segments(file, self._source, np.asarray(image.dataobj), self._affine, class_names)
        return file.name


def read_new_volumes(path: Path, spec: Spec) -> Iterator[NewVolume]:
    """Volumes in RAS orientation and ``spacing`` (mm): whole ones, or their slices, each at least ``size`` and a
    multiple of ``multiple``. Unlike in training nothing is cropped: the network sees whole slices.

    Raises:
        DataError: a volume is missing, broken or two have one name.
    """
    for name, files in find_volumes(path):
        image, affine = read_image(*files)
        whole: Any = prepare(image, affine, spec.spacing, None, spec.intensity)
        if len(spec.size) == 3:
            inputs = whole.as_tensor()[None]
        else:
            slices = whole.as_tensor() if spec.whole else _padded(whole.as_tensor(), spec)
            inputs = slices.permute(3, 0, 1, 2).contiguous()
        grid, lengths = whole.affine.double().numpy(), tuple(whole.shape[1:])
        yield NewVolume(name, inputs, files[0], affine, image.shape[1:], grid, lengths, spec.readout)


def _padded(whole: Tensor, spec: Spec) -> Tensor:
    """With zeros around each slice, as many before as after it."""
    import torch

    step = spec.multiple
    lengths = list(zip(spec.plane(), whole.shape[1:3], strict=True))
    wanted = [max(least, -(-length // step) * step) for least, length in lengths]
    before = [_before(length, target) for (_, length), target in zip(lengths, wanted, strict=True)]
    after = [target - length - first for (_, length), target, first in zip(lengths, wanted, before, strict=True)]
    return torch.nn.functional.pad(whole, (0, 0, before[1], after[1], before[0], after[0]))


def _before(length: int, padded: int) -> int:
    """What of a padded axis lies before it."""
    return (padded - length) // 2


def _save(file: Path, values: NDArray[Any], affine: NDArray[np.float64], source: Path) -> None:
    """Write a NIfTI file with the geometry of ``source``, whole or not at all."""
    import nibabel as nib

    if source.is_file() and source.name.lower().endswith(NIFTI):
        like: Any = nib.load(source)
        image = nib.Nifti1Image(values, like.affine)
        for kind in ("qform", "sform"):  # which of the two counts is part of a file's geometry
            code = int(like.header[f"{kind}_code"])
            getattr(image, f"set_{kind}")(getattr(like, f"get_{kind}")(), code)
        image.header.set_xyzt_units(*like.header.get_xyzt_units())
    else:
        image = nib.Nifti1Image(values, affine)
    temporary = file.with_name(f".{file.name.removesuffix('.nii.gz')}.part.nii.gz")
    nib.save(image, temporary)
    temporary.replace(file)
