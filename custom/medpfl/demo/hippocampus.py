# SPDX-License-Identifier: Apache-2.0
"""Site files and volumes of the Medical Segmentation Decathlon's hippocampus task, which the user downloads.

MR volumes of one hippocampus each with its two parts outlined (Simpson et al., arXiv:1902.09063, 2019; Task04). They
come from visibly different sources: as integers of 8 bit, as numbers up to some thousands, and as numbers up to more
than a million. Each source is a hospital. Which volumes are of one person the Decathlon does not say (it has volumes of
195 persons, mostly two of each), so a person's left and right hippocampus may lie in two parts of a split.
"""

import gzip
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import yaml

from medpfl.core.errors import DataError

ENVIRONMENT_VARIABLE = "MEDPFL_HIPPOCAMPUS"
LABELS = {0: "background", 1: "anterior", 2: "posterior"}
FRACTIONS = {"train": 0.6, "validation": 0.15, "test": 0.25}
LARGE = 50_000
"""Volumes whose brightest voxel is above this are of the third source."""
_KINDS = {"images": "images", "imagesTr": "images", "labels": "labels", "labelsTr": "labels"}
_SOURCES = ("eight_bit", "float", "large")

Files = Mapping[str, Callable[[], bytes]]
"""Name of a case to what reads its file, gzip-compressed NIfTI."""


def write_hippocampus(folder: Path, data: Path | None = None, hospitals: int = 3) -> list[str]:
    """Write ``<hospital>.yaml`` and ``<hospital>/`` (images, labels, datalist.json); returns the names.

    The site files cut each hospital's cases at random; a comparison's ``splits`` cut them anew.

    Args:
        data: the unpacked folder Task04_Hippocampus, or a ZIP file or folder with ``images`` and ``labels``; None:
            $MEDPFL_HIPPOCAMPUS.
        hospitals: 3, one a source; or 4, where every second volume of the largest source is at another hospital.

    Raises:
        DataError: the data are not there or not whole; says what to download.
    """
    with _opened(data or Path(os.environ.get(ENVIRONMENT_VARIABLE, "data/Task04_Hippocampus"))) as (images, labels):
        sources: dict[str, list[str]] = {source: [] for source in _SOURCES}
        for name in sorted(labels):
            sources[_source_of(images[name](), name)].append(name)
        if hospitals == 4:
            largest = max(sources, key=lambda source: len(sources[source]))
            cases = sources.pop(largest)
            sources |= {f"{largest}_1": cases[::2], f"{largest}_2": cases[1::2]}
        for site, names in sources.items():
            if not names:
                raise DataError(f"the hippocampus data hold no volume of the source '{site}'")
            _write(folder, site, names, images, labels)
    return list(sources)


@contextmanager
def _opened(place: Path) -> Iterator[tuple[Files, Files]]:
    """Images and labels of the cases that have a label."""
    if place.is_dir():
        yield _paired(place, {str(path.relative_to(place)): path.read_bytes for path in sorted(place.rglob("*.gz"))})
        return
    try:
        with zipfile.ZipFile(place) as archive:
            yield _paired(place, {name: _reader(archive, name) for name in archive.namelist()})
    except FileNotFoundError as error:
        raise DataError(
            f"the hippocampus data are not at {place}. Download Task04_Hippocampus of the Medical Segmentation "
            f"Decathlon (medicaldecathlon.com, CC BY-SA 4.0), unpack it, and set {ENVIRONMENT_VARIABLE} to its folder"
        ) from error
    except zipfile.BadZipFile as error:
        raise DataError(f"{place}: expected a ZIP file or a folder, got a broken archive: {error}") from error


def _reader(archive: zipfile.ZipFile, name: str) -> Callable[[], bytes]:
    return lambda: archive.read(name)


def _paired(place: Path, files: Files) -> tuple[Files, Files]:
    found: dict[str, dict[str, Callable[[], bytes]]] = {"images": {}, "labels": {}}
    for name, read in files.items():
        path = PurePosixPath(name)
        if path.parent.name in _KINDS and path.name.endswith(".nii.gz") and not path.name.startswith("."):
            found[_KINDS[path.parent.name]][path.name.removesuffix(".nii.gz")] = read
    images, labels = found["images"], found["labels"]
    missing = sorted(set(labels) - set(images))
    if not labels or missing:
        what = f"the image of {missing[0]} is missing" if missing else "no labels were found"
        raise DataError(
            f"{place}: expected volumes in the folders imagesTr and labelsTr (or images and labels): {what}"
        )
    return images, labels


def _source_of(content: bytes, name: str) -> str:
    import nibabel as nib

    try:
        image: Any = nib.Nifti1Image.from_bytes(gzip.decompress(content))
        values = np.asarray(image.dataobj)
    except Exception as error:  # readers raise anything on a broken file; the sentence keeps the cause
        raise DataError(f"{name}: cannot be read as a NIfTI volume: {type(error).__name__}: {error}") from error
    if values.dtype == np.uint8:
        return _SOURCES[0]
    return _SOURCES[2] if float(values.max()) > LARGE else _SOURCES[1]


def _write(folder: Path, site: str, names: list[str], images: Files, labels: Files) -> None:
    for kind, files in (("images", images), ("labels", labels)):
        (folder / site / kind).mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / site / kind / f"{name}.nii.gz").write_bytes(files[name]())
    items = [{"image": f"images/{name}.nii.gz", "label": f"labels/{name}.nii.gz"} for name in names]
    listed = {"name": "Hippocampus", "labels": {str(k): v for k, v in LABELS.items()}, "training": items}
    (folder / site / "datalist.json").write_text(json.dumps(listed, indent=1))
    dataset = {
        "kind": "volumes",
        "datalist": f"{site}/datalist.json",
        "labels": LABELS,
        "split": {"seed": 0, "fractions": FRACTIONS},
    }
    site_file = yaml.safe_dump({"site": site, "datasets": {"hippocampus": dataset}}, sort_keys=False)
    (folder / f"{site}.yaml").write_text(
        f"# Hippocampus of the Medical Segmentation Decathlon (CC BY-SA 4.0): Simpson et al., 2019.\n{site_file}"
    )
