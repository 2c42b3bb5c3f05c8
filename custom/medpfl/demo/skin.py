# SPDX-License-Identifier: Apache-2.0
"""Site files, images, masks and tables for the sources of HAM10000 (Tschandl et al., 2018), which the user downloads.

Dermatoscopic images of four sources: Rosendahl's practice, and three cameras of the department in Vienna. Every source
(or, as in the CusFL paper, each of the two hospitals; or, as in the MH-pFLID paper, each of four resolutions of
the same images) is a site. Images of one lesion stay in one split, at all sites together: nine lesions occur in two
sources. The split is stratified by source and diagnosis.
"""

import copy
import csv
import io
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.core.seeding import derive_seed
from medpfl.data.samples import in_parallel

ENVIRONMENT_VARIABLE = "MEDPFL_HAM10000"
_SOURCES = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
SITES: dict[str, dict[str, tuple[str, ...]]] = {
    "sources": {name: (name,) for name in _SOURCES},
    "hospitals": {"rosendahl": ("rosendahl",), "vidir": ("vidir_modern", "vidir_molemax", "vienna_dias")},
    "resolutions": dict.fromkeys(("full", "half", "quarter", "eighth"), _SOURCES),
}
"""What the sites are: name to its sources."""
COARSER = {"half": 2, "quarter": 4, "eighth": 8}
"""Site to how many times fewer pixels its images have, in each direction."""
DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
MALIGNANT = ("akiec", "bcc", "mel")
SIZE = (64, 48)
"""Width and height of the copies, unless another size is asked for."""
TEST, VALIDATION = 0.2, 0.16
FOLDS = 5
_ALL = "all"
PUBLIC = "public"
_MASK = "_segmentation"
_FOLD_COLUMNS = tuple(f"fold_{number}" for number in range(FOLDS))
_COLUMNS = ("image_id", "lesion_id", "dx", "dataset")

Rows = list[dict[str, str]]


def write_skin(
    folder: Path,
    data: Path | None = None,
    sites: str = "sources",
    size: tuple[int, int] | None = SIZE,
    fold: int = 0,
    parts: int = 1,
    images: int | None = None,
    public: int = 0,
) -> list[str]:
    """Write ``<site>.yaml`` and ``<site>/`` (images, masks, table.csv) for every site; returns their names.

    Each site declares three datasets of the same images and split: ``skin_diagnosis`` (seven classes),
    ``skin_malignant`` (benign, malignant) and ``skin_lesion`` (masks).

    Args:
        data: the ZIP file or folder with images (ID.jpg), masks (ID_segmentation.png) and metadata.csv, in any
            subfolders; None: $MEDPFL_HAM10000.
        sites: "sources" (four), "hospitals" (two, as in the CusFL paper) or "resolutions" (four, as in the MH-pFLID
            paper: the same images at each, 1, 2, 4 and 8 times coarser).
        size: width and height in pixels of the copies, which are quick to read; None: the files as they are, as links
            where ``data`` is a folder.
        fold: 0 to 4: which fifth of the lesions is the test part. The site files name all five as folds.
        parts: into how many sites each is divided, ``<site>_1`` ...: its training and validation lesions are dealt out,
            and all have its whole test part, as with the CusFL paper's 8 to 64 clients.
        images: at most so many a site, whole lesions: of every diagnosis as many lesions as there are, or as of the
            other diagnoses; None: all.
        public: at most so many images that no site has, chosen alike from all sources. They lie in ``public/``, and
            every site declares them as ``skin_diagnosis_public`` and so on.

    Raises:
        DataError: the data are not there or not whole; says what to download and where to put it.
    """
    with opened(skin_data(data)) as source:
        rows = rows_of(source)
        source.check(f"{row['image_id']}{suffix}" for row in rows for suffix in (".jpg", f"{_MASK}.png"))
        shared = _spread(rows, public, PUBLIC)
        lesions = {row["lesion_id"] for row in shared}
        kept = {}
        for site, names in SITES[sites].items():
            mine = [row for row in rows if row["dataset"] in names and row["lesion_id"] not in lesions]
            kept[site] = mine if images is None else _spread(mine, images, "+".join(names))
        used = {row["image_id"] for part in (shared, *kept.values()) for row in part}
        folds = [_parts([row for row in rows if row["image_id"] in used], number) for number in range(FOLDS)]
        if shared:
            _write_images(folder / PUBLIC, shared, folds, _dealt(shared, folds[fold], 1), source, size, 1)
        for site, mine in kept.items():
            dealt = _dealt(mine, folds[fold], parts)
            _write_images(folder / site, mine, folds, dealt, source, size, COARSER.get(site, 1))
            _write_declarations(folder, site, fold, size, parts, bool(shared))
    return [name for site in SITES[sites] for name in _names(site, parts)]


def skin_data(given: Path | None) -> Path:
    """Where the data are: as given, else $MEDPFL_HAM10000."""
    return given or Path(os.environ.get(ENVIRONMENT_VARIABLE, "data/ham10000"))


def _names(site: str, parts: int) -> list[str]:
    return [site] if parts == 1 else [f"{site}_{number}" for number in range(1, parts + 1)]


class _Source:
    """The files of an archive or a folder, by name without folders."""

    def __init__(self, place: Path, archive: zipfile.ZipFile | None):
        self.place, self.archive = place, archive
        found = archive.namelist() if archive else [str(path) for path in sorted(place.rglob("*"))]
        self.files = {Path(name).name: name for name in found}

    def check(self, names: Iterable[str]) -> None:
        """Raises DataError unless all are there."""
        missing = [name for name in names if name not in self.files]
        if missing:
            raise DataError(f"{self.place}: {len(missing)} files of its table are not there, such as {missing[0]}")

    def read(self, name: str) -> bytes:
        return self.archive.read(self.files[name]) if self.archive else Path(self.files[name]).read_bytes()

    def put(self, name: str, target: Path) -> None:
        """The file itself: out of the archive, or a link to it."""
        if self.archive:
            target.write_bytes(self.read(name))
        else:
            target.symlink_to(Path(self.files[name]).resolve())


@contextmanager
def opened(data: Path) -> Iterator[_Source]:
    if data.is_dir():
        yield _Source(data, None)
    elif data.is_file():
        try:
            with zipfile.ZipFile(data) as archive:
                yield _Source(data, archive)
        except zipfile.BadZipFile as error:
            raise DataError(f"{data}: expected a ZIP file or a folder, got a broken archive: {error}") from error
    else:
        raise DataError(
            f"HAM10000 is not at {data}. Download the dataset 'HAM10000' (images, lesion segmentations and metadata; "
            f"doi:10.7910/DVN/DBW86T), put it into one folder or ZIP file, and set {ENVIRONMENT_VARIABLE} to it"
        )


def rows_of(source: _Source) -> Rows:
    """The table's rows of the four sources, each with its ``image_id`` without suffix, sorted by it."""
    tables = sorted(name for name in source.files if name.endswith("metadata.csv"))
    if len(tables) != 1:
        raise DataError(f"{source.place}: expected one table *metadata.csv, found {', '.join(tables) or 'none'}")
    reader = csv.DictReader(io.StringIO(source.read(tables[0]).decode("utf-8-sig")))
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or [])]
    if missing:
        raise DataError(f"{source.place}: {tables[0]} has no column {', '.join(missing)}")
    known = SITES["sources"]
    rows = []
    for row in reader:
        if row["dataset"] in known:  # others are rows of other collections, or empty
            if row["dx"] not in DIAGNOSES:
                raise DataError(f"{source.place}: {tables[0]}:{reader.line_num}: unknown diagnosis '{row['dx']}'")
            rows.append({column: row[column] for column in _COLUMNS} | {"image_id": Path(row["image_id"]).stem})
    absent = sorted(set(known) - {row["dataset"] for row in rows})
    if absent:
        raise DataError(f"{source.place}: {tables[0]} has no row of the source {', '.join(absent)}")
    return sorted(rows, key=lambda row: row["image_id"])


def _spread(rows: Rows, count: int, purpose: str) -> Rows:
    """At most ``count`` of the rows, in their order: whole lesions, of each diagnosis in turn while it has any."""
    waiting: dict[str, dict[str, int]] = {}
    for row in rows:
        lesions = waiting.setdefault(row["dx"], {})
        lesions[row["lesion_id"]] = lesions.get(row["lesion_id"], 0) + 1
    queues = []
    for diagnosis, lesions in sorted(waiting.items()):
        names = list(lesions)
        order = np.random.default_rng(derive_seed(0, purpose, diagnosis)).permutation(len(names))
        queues.append([(names[index], lesions[names[index]]) for index in order])
    chosen: set[str] = set()
    for number in range(max(map(len, queues), default=0)):
        for queue in queues:
            if number < len(queue) and queue[number][1] <= count:
                chosen.add(queue[number][0])
                count -= queue[number][1]
    return [row for row in rows if row["lesion_id"] in chosen]


def _parts(rows: Rows, fold: int) -> dict[str, str]:
    """Lesion to train, validation or test: of every source's lesions with one diagnosis the same shares."""
    strata: dict[tuple[str, str], list[str]] = {}
    seen: set[str] = set()
    for row in rows:
        if row["lesion_id"] not in seen:
            seen.add(row["lesion_id"])
            strata.setdefault((row["dataset"], row["dx"]), []).append(row["lesion_id"])
    part = {}
    for (source, diagnosis), lesions in strata.items():
        rng = np.random.default_rng(derive_seed(0, source, diagnosis))
        start, end = (round(TEST * number * len(lesions)) for number in (fold, fold + 1))
        tests, validations = end - start, round(VALIDATION * len(lesions))
        for number, index in enumerate(rng.permutation(len(lesions))):
            place = (number - start) % len(lesions)  # the validation part follows the test part
            split = "test" if place < tests else "validation" if place < tests + validations else "train"
            part[lesions[index]] = split
    return part


def _dealt(rows: Rows, part: dict[str, str], parts: int) -> dict[str, str]:
    """Lesion to the number of its part; those of the test part to "all"."""
    strata: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        strata.setdefault((part[row["lesion_id"]], row["dx"]), {})[row["lesion_id"]] = None
    number, dealt = 0, {}
    for (split, diagnosis), lesions in sorted(strata.items()):
        names = list(lesions)
        for index in np.random.default_rng(derive_seed(parts, split, diagnosis)).permutation(len(names)):
            dealt[names[index]] = _ALL if split == "test" else str(number % parts + 1)
            number += 1
    return dealt


def _write_images(
    base: Path,
    rows: Rows,
    folds: list[dict[str, str]],
    dealt: dict[str, str],
    source: _Source,
    size: tuple[int, int] | None,
    coarser: int,
) -> None:
    """Images, masks and ``table.csv`` of one site, or of the public part."""
    for name in ("images", "masks"):
        (base / name).mkdir(parents=True, exist_ok=True)
    if coarser > 1 and size is None:
        raise DataError("images of several resolutions are copies: they need a size")
    with open(base / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*_COLUMNS, *_FOLD_COLUMNS, "part"))
        writer.writeheader()
        for row in rows:
            lesion = row["lesion_id"]
            cuts = {column: part[lesion] for column, part in zip(_FOLD_COLUMNS, folds, strict=True)}
            writer.writerow({**row, **cuts, "part": dealt[lesion]})

    def copy(image_id: str) -> None:
        image, mask = f"{image_id}.jpg", f"{image_id}{_MASK}.png"
        pairs = ((image, base / "images" / (image_id + _suffix(size))), (mask, base / "masks" / mask))
        for name, target in pairs:
            target.unlink(missing_ok=True)
            if size is None:
                source.put(name, target)
                if name == mask:
                    _without_palette(target)
            elif name == image and coarser > 1:
                pixels = (max(1, size[0] // coarser), max(1, size[1] // coarser))
                _resized(source, name, pixels, Image.Resampling.BICUBIC).save(target)  # as in the MH-pFLID paper
            else:
                # A mask stays a mask: its values are the nearest pixels'.
                how = Image.Resampling.NEAREST if name == mask else Image.Resampling.BILINEAR
                _resized(source, name, size, how).save(target)
                if name == mask:
                    _without_palette(target)

    for _ in in_parallel(copy, [row["image_id"] for row in rows]):
        pass


def _suffix(size: tuple[int, int] | None) -> str:
    return ".png" if size else ".jpg"


def _write_declarations(
    folder: Path, site: str, fold: int, size: tuple[int, int] | None, parts: int, public: bool
) -> None:
    """The site files of one site and its parts."""
    suffix = _suffix(size)
    for number, name in enumerate(_names(site, parts), start=1):
        where: dict[str, object] = {} if parts == 1 else {"where": {"part": [str(number), _ALL]}}
        split: dict[str, object] = {"column": _FOLD_COLUMNS[fold], "group": "lesion_id"}
        if parts == 1:  # the lesions are dealt out by one fold's cut
            split["folds"] = list(_FOLD_COLUMNS)
        datasets = _datasets(site, suffix, where, split)
        if public:
            shared = _datasets(PUBLIC, suffix, {}, {"group": "lesion_id"})
            datasets |= {f"{task}_{PUBLIC}": {**declared, "public": True} for task, declared in shared.items()}
        text = yaml.safe_dump({"site": name, "datasets": datasets}, sort_keys=False)
        (folder / f"{name}.yaml").write_text(
            "# HAM10000 (CC BY-NC 4.0): Tschandl, Rosendahl, Kittler. Paths are relative to this file.\n" + text
        )


def _without_palette(path: Path) -> None:
    """A mask whose values are indices of a palette, in the greys that are seen: some copies of the data have palettes
    that begin with white, and the index 0 is then the lesion."""
    try:
        with Image.open(path) as image:
            if image.mode != "P":
                return
            seen = image.convert("L")
    except OSError as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    path.unlink()  # it may be a link to the original
    seen.save(path)


def _resized(source: _Source, name: str, size: tuple[int, int], how: Image.Resampling) -> Image.Image:
    try:
        with Image.open(io.BytesIO(source.read(name))) as image:
            return image.resize(size, how)
    except OSError as error:
        raise DataError(f"{source.place}: {name} cannot be read as an image: {error}") from error


def _datasets(
    site: str, suffix: str, where: dict[str, object], split: dict[str, object]
) -> dict[str, dict[str, object]]:
    classes = {
        "skin_diagnosis": {name: [name] for name in DIAGNOSES},
        "skin_malignant": {
            "benign": [name for name in DIAGNOSES if name not in MALIGNANT],
            "malignant": list(MALIGNANT),
        },
    }
    masks = {
        "files": f"{site}/masks/*.png",
        "suffix": _MASK,
        "labels": {0: "background", 1: "lesion"},
        "label_map": {255: 1},
    }
    targets: dict[str, dict[str, object]] = {
        **{name: {"label": {"column": "dx", "classes": found}} for name, found in classes.items()},
        "skin_lesion": {"masks": masks},
    }
    return {
        name: {
            "kind": "images",
            "files": f"{site}/images/*{suffix}",
            "table": {"file": f"{site}/table.csv", "image": "image_id", **where},
            **target,
            "split": copy.deepcopy(split),  # the YAML file shall not refer from one dataset to another
        }
        for name, target in targets.items()
    }
