# SPDX-License-Identifier: Apache-2.0
"""How inputs of an exported model are prepared, in numpy and Python's own library alone: no MedPFL, no torch.

This file lies beside an exported model as prepare.py, with the model's own numbers in medpfl.json. Run it, or copy what
you need of it:

    python prepare.py FILE inputs.npy

FILE is an image (Pillow reads PNG, JPEG and the like; PPM, PGM and .npy files need numpy alone), a CSV or TSV table, a
recording (a CSV or TSV file with a row per time step, or an .npz file), or an .npz file of arrays, as the model was
trained on. inputs.npy holds N x ... float32, the exported network's ``input``.
"""

import csv
import json
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Told = Mapping[str, Any]
"""medpfl.json: what the export says of its model."""


KINDS = ("images", "table", "series", "arrays")
COLOURS = ((), (1,), (3,))
"""What may follow an image's height and width."""
_PIXELS = re.compile(rb"(P[56])\s+(\d+)\s+(\d+)\s+255\s")  # one blank: what follows is the first pixel, whatever it is


def prepared(path: Path, told: Told) -> Array:
    """Network inputs of a file, N x ... float32.

    Raises:
        ValueError: the file is none that the model takes, or lacks what it needs.
    """
    kind = told["preparation"].get("kind")
    if kind not in KINDS:
        raise ValueError(f"this file prepares {', '.join(KINDS)}; the model was trained on {kind}")
    prepare = dict(zip(KINDS, (_of_image, _of_table, _of_recording, _of_arrays), strict=True))[kind]
    inputs: Array = np.ascontiguousarray(prepare(path, told), dtype=np.float32)
    return inputs


def image(pixels: Array, told: Told) -> Array:
    """An image as network input, C x H x W.

    Args:
        pixels: H x W or H x W x 3, uint8 or uint16, turned as it is meant to be seen.
    """
    preparation, grid, scaling = told["preparation"], told["grid"], told["grid"]["scaling"]
    if pixels.dtype.name not in scaling["maximum"] or pixels.ndim not in (2, 3) or pixels.shape[2:] not in COLOURS:
        raise ValueError(f"expected H x W or H x W x 3 of 8 or 16 bits, got {pixels.shape} of {pixels.dtype}")
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    if preparation["channels"] == 1 and len(planes) == 3:  # ITU-R 601-2, as Pillow rounds it
        red, green, blue = planes.astype(np.int64)
        planes = ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16)[None].astype(pixels.dtype)
    elif preparation["channels"] == 3 and len(planes) == 1:
        planes = np.repeat(planes, 3, axis=0)
    values = resized(planes, grid["size"])
    inputs: Array = (values / scaling["maximum"][pixels.dtype.name] - scaling["centre"]) / scaling["spread"]
    return inputs


def mask(outputs: Array, shape: Sequence[int], told: Told) -> Array:
    """The classes of a segmented image in its own size, H x W uint8; arguments as of ``shares``."""
    found = shares(outputs, shape, told)
    written: Sequence[int] | None = told["output"].get("written")
    if written is None:
        classes: Array = found.argmax(axis=0).astype(np.uint8)
        return classes
    classes = np.zeros(found.shape[1:], np.uint8)
    for label, share in zip(written, found, strict=True):  # the later overwrites the earlier
        classes[share > 0.5] = label
    return classes


def shares(outputs: Array, shape: Sequence[int], told: Told) -> Array:
    """The probabilities of the classes, or of regions that overlap, in an image's own size, K x H x W.

    Args:
        outputs: K x h x w, the exported network's for one image.
        shape: the image's height and width.
    """
    if "written" in told["output"]:
        return resized(1 / (1 + np.exp(-outputs.astype(np.float64))), shape)
    powers = np.exp(outputs - outputs.max(axis=0, keepdims=True))
    return resized(powers / powers.sum(axis=0), shape)


def resized(planes: Array, size: Sequence[int] | None) -> Array:
    """C x H x W of another size (height, width): bilinear with antialiasing, as torch's ``interpolate(mode="bilinear",
    antialias=True, align_corners=False)``. None: as large as it is."""
    values = planes.astype(np.float64)
    if size is None or tuple(values.shape[1:]) == tuple(size):
        return values
    rows, columns = (_weights(before, after) for before, after in zip(values.shape[1:], size, strict=True))
    found: Array = rows @ values @ columns.T
    return found


def _weights(before: int, after: int) -> Array:
    """after x before: a triangle as wide as a new pixel (or an old one, where new ones are smaller); rows sum to 1."""
    scale = before / after
    width = max(scale, 1.0)
    weights = np.zeros((after, before))
    for new in range(after):
        centre = scale * (new + 0.5)
        first, last = max(int(centre - width + 0.5), 0), min(int(centre + width + 0.5), before)
        old = np.arange(first, last)
        weights[new, first:last] = np.maximum(0, 1 - np.abs((old - centre + 0.5) / width))
    found: Array = weights / weights.sum(axis=1, keepdims=True)
    return found


def _of_image(path: Path, told: Told) -> Array:
    return image(_pixels(path, told["preparation"]["channels"]), told)[None]


def _pixels(path: Path, channels: int) -> Array:
    if path.suffix.lower() == ".npy":
        loaded: Array = np.load(path, allow_pickle=False)
        return loaded
    if path.suffix.lower() in (".ppm", ".pgm"):
        content = path.read_bytes()
        header = _PIXELS.match(content)
        if header is None:
            raise ValueError(f"{path}: expected a binary PPM or PGM file of 8 bits without comments")
        form, width, height = header[1], int(header[2]), int(header[3])
        depth = 3 if form == b"P6" else 1
        count = width * height * depth
        held = content[header.end() : header.end() + count]
        if not count or len(held) < count:
            raise ValueError(f"{path}: expected {width} x {height} pixels, and the file ends before")
        pixels = np.frombuffer(held, np.uint8).reshape(height, width, depth)
        return pixels[..., 0] if depth == 1 else pixels
    from PIL import Image, ImageOps

    with path.open("rb") as file, Image.open(file) as opened:  # by its path a grey TIFF on its side is read wrongly
        if getattr(opened, "n_frames", 1) > 1:
            raise ValueError(f"{path}: expected one picture, got {getattr(opened, 'n_frames', 1)}")
        if opened.mode.startswith("I") and getattr(opened, "tag_v2", {}).get(262) == 0:
            raise ValueError(f"{path}: expected 0 to be black, and in this TIFF of 16 bits it is white")
        seen = ImageOps.exif_transpose(opened)
    if seen.mode == "F":
        raise ValueError(f"{path}: expected whole numbers of 8 or 16 bits, got fractions")
    if seen.mode.startswith("I"):
        deep = np.asarray(seen)
        if deep.min() < 0 or deep.max() > 65535:
            raise ValueError(f"{path}: expected values of 8 or 16 bits, got {deep.min()} to {deep.max()}")
        return deep.astype(np.uint16)
    if seen.has_transparency_data:  # what is transparent becomes black
        seen = Image.alpha_composite(Image.new("RGBA", seen.size, (0, 0, 0, 255)), seen.convert("RGBA"))
    if seen.mode == "LAB":
        seen = seen.convert("RGB")
    return np.asarray(seen.convert("L" if channels == 1 else "RGB"))


def _canonical(value: object) -> str:
    """ "3", "3.0" and 3 are the same; 1_5, of which Python would make 15, is no number; of codes with more digits than
    a double holds all count."""
    text = str(value)
    try:
        number = float("none" if "_" in text else text)
    except ValueError:
        return text
    if not 2**53 <= abs(number) < float("inf"):
        return repr(number)
    whole = re.fullmatch(r"([+-]?[0-9]+)(\.0*)?", text.strip())
    return str(int(whole[1] if whole else number))


def _with_point(cell: str, number: bool) -> str:
    """Of a file whose decimal sign is a comma; where a number belongs, one with a point may be a thousand."""
    if number and "." in cell:
        raise ValueError(f"expected a number with a decimal comma, got '{cell}'")
    return cell.replace(",", ".") if re.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?", cell) else cell


def _number(name: str, cell: object) -> float:
    """A cell of a column of numbers."""
    try:
        found = float("nan" if "_" in str(cell) else str(cell))
    except ValueError:
        found = float("nan")
    if not abs(found) <= np.finfo(np.float32).max:
        raise ValueError(f"column '{name}': expected a number, got '{cell}'")
    return found


def _lines(path: Path, separator: str) -> tuple[list[list[str]], list[int]]:
    """Cells and number of every line of a text table that is not blank."""
    lines, places = [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, skipinitialspace=separator != " ", strict=True)
        try:
            for line in reader:
                if len(line) > 1 or (line and line[0].strip()):
                    lines.append([cell.strip() for cell in line])
                    places.append(reader.line_num)
        except csv.Error as error:  # a quotation mark that is not closed would hide rows in one cell
            raise ValueError(f"{path}: {error}") from error
    return lines, places


def _columns(path: Path, told: Told, wanted: Sequence[str], numbers: Sequence[str]) -> dict[str, list[str | None]]:
    """The named columns of a text table; None where a cell is missing."""
    cells = told["preparation"]["cells"]
    separator = cells["separator"] or ("\t" if path.suffix.lower() in (".tsv", ".tab") else ",")
    lines, places = _lines(path, separator)
    if not lines:
        raise ValueError(f"{path}: it has no rows")
    if not cells["columns"]:
        places = places[1:]
    names = cells["columns"] or lines.pop(0)
    names = [cells["rename"].get(name, name) for name in names]
    answers = told["preparation"].get("answers") or [told["preparation"]["label"]]
    if cells["columns"] and lines and len(lines[0]) == len(names) - sum(name in answers for name in names):
        names = [name for name in names if name not in answers]
    for name in wanted:
        if names.count(name) != 1:
            raise ValueError(f"{path}: expected one column '{name}', got {', '.join(names)}")
    for place, line in zip(places, lines, strict=True):
        if len(line) != len(names):  # a comma too many would shift the columns behind it
            raise ValueError(f"{path}:{place}: expected {len(names)} columns, got {len(line)}")
    missing = {_canonical(text) for text in cells["missing"]}
    found: dict[str, list[str | None]] = {}
    for name in wanted:
        codes = {_canonical(value): str(meant) for value, meant in cells["codes"].get(name, {}).items()}
        texts = [line[names.index(name)] for line in lines]
        if cells.get("decimal") == ",":
            texts = [text if text in cells["missing"] else _with_point(text, name in numbers) for text in texts]
        known = [None if _canonical(text) in missing else text for text in texts]
        found[name] = [text if text is None else codes.get(_canonical(text), text) for text in known]
    return found


def _of_table(path: Path, told: Told) -> Array:
    preparation = told["preparation"]
    features, imputed = preparation["features"], preparation["imputed"]
    columns = _columns(path, told, list(features), [name for name, kind in features.items() if kind == "number"])
    coded: list[list[float]] = []
    for name, kind in features.items():
        cells: list[Any] = [imputed.get(name) if cell is None else cell for cell in columns[name]]
        if None in cells:
            raise ValueError(f"{path}: column '{name}' lacks values, and the model was trained on rows without such")
        if kind == "number":
            coded.append([_number(name, cell) for cell in cells])
            continue
        values = [_canonical(value) for value in kind]
        for cell in cells:
            if _canonical(cell) not in values:
                raise ValueError(f"column '{name}': '{cell}' is not among {', '.join(map(str, kind))}")
        places = [values.index(_canonical(cell)) for cell in cells]
        coded += [[float(place == category) for place in places] for category in range(1, len(kind))]
    rows: Array = (np.array(coded).T - np.array(preparation["mean"])) / np.array(preparation["scale"])
    return rows


def _of_recording(path: Path, told: Told) -> Array:
    preparation = told["preparation"]
    if preparation["inputs"] is not None:
        [(key, values)] = _held(path, [preparation["inputs"]])
        if values.ndim != 3 or not values.size or values.shape[1] != len(preparation["mean"]):
            expected = f"n x {len(preparation['mean'])} channels x length"
            raise ValueError(f"{path}: array '{key}': expected {expected}, got the shape {values.shape}")
        recordings = [entry.T for entry in _single(path, key, values, gaps=True)]  # T x C each
    else:
        columns = _columns(path, told, preparation["channels"], preparation["channels"])
        read = [[np.nan if one is None else _number(name, one) for one in texts] for name, texts in columns.items()]
        recordings = [np.array(read, np.float32).T]
    parts = []
    for values in recordings:
        if preparation["missing_samples"] == "interpolate":
            steps = np.arange(len(values))
            for channel in values.T:
                known = ~np.isnan(channel)
                if known.any():
                    channel[:] = np.interp(steps, steps[known], channel[known])
        if np.isnan(values).any():
            raise ValueError(f"{path}: samples are missing, and the model was trained on recordings without gaps")
        scaled = ((values - np.array(preparation["mean"])) / np.array(preparation["scale"])).astype(np.float32)
        length = preparation["length"]
        if len(scaled) < length:
            raise ValueError(f"{path}: expected at least {length} time steps (a window), got {len(scaled)}")
        parts.append(np.lib.stride_tricks.sliding_window_view(scaled, length, axis=0)[:: preparation["step"]])
    windows: Array = np.concatenate(parts)
    return windows


def _of_arrays(path: Path, told: Told) -> Array:
    preparation, spatial = told["preparation"], told["input"]["shape"][2:]
    parts = []
    for key, values in _held(path, [preparation["inputs"]] if preparation["inputs"] else None):
        place, trained = f"{path}: array '{key}'", preparation["dtype"]
        if values.dtype.name != trained and {values.dtype.name, trained} & {"bool", "uint8", "uint16"}:
            raise ValueError(f"{place} is of type {values.dtype}; the model was trained on {trained}")
        layout = preparation["layout"] or _layout(place, values.shape)
        if len(layout) != values.ndim:
            raise ValueError(f"{place}: expected the axes {layout}, got the shape {values.shape}")
        planes = np.moveaxis(values, layout.index("C"), 1) if "C" in layout else values[:, None]
        if planes.shape[1] != len(preparation["mean"]):
            channels = len(preparation["mean"])
            raise ValueError(f"{place} has {planes.shape[1]} channels; the model was trained on {channels}")
        if len(planes.shape[2:]) != len(spatial) or (len(spatial) == 3 and list(planes.shape[2:]) != list(spatial)):
            lengths = " x ".join(map(str, spatial))
            raise ValueError(f"{place} has the shape {values.shape}; the model takes inputs of {lengths}")
        parts.append(_single(path, key, planes, gaps=False))
    values = np.concatenate(parts)
    if len(spatial) == 2:
        values = np.stack([resized(planes, told["grid"]["size"]) for planes in values])
    shape = (-1, *[1] * len(spatial))
    return (values - np.reshape(preparation["mean"], shape)) / np.reshape(preparation["scale"], shape)


def _held(path: Path, names: Sequence[str] | None) -> list[tuple[str, Array]]:
    """The named arrays of an .npz file; None: those that MedMNIST's files have."""
    with path.open("rb") as opened:
        try:
            file = np.load(opened, allow_pickle=False)
            known: Sequence[str] = getattr(file, "files", [])
            usual = ("train_images", "val_images", "test_images")
            wanted = [key for key in usual if key in known] if names is None else names
            if not wanted or not set(wanted) <= set(known):
                told = ", ".join(names or usual)
                raise ValueError(f"{path}: expected an .npz file with {told}; the file has: {', '.join(known)}")
            return [(key, file[key]) for key in wanted]
        except (BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path}: cannot be read as an .npz file: {error}") from error


def _single(path: Path, key: str, values: Array, gaps: bool) -> Array:
    """Numbers in single precision, in which everything is computed; ``gaps``: NaN is a missing sample."""
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{path}: array '{key}': expected real numbers, got the type {values.dtype}")
    with np.errstate(over="ignore"):
        small: Array = values.astype(np.float32)
    if np.isinf(small).any() or not (gaps or np.isfinite(small).all()):
        raise ValueError(f"{path}: array '{key}' holds values that are not finite, or too large")
    return small


def _layout(place: str, shape: Sequence[int]) -> str:
    """What the axes of an array are where no site file said so: only where its shape leaves no doubt."""
    if len(shape) == 3:
        return "NHW"
    if len(shape) == 4:
        first, last = shape[1] in (1, 3), shape[3] in (1, 3)
        if first != last:
            return "NCHW" if first else "NHWC"
        if not first and min(shape[1:]) > 4:
            return "NDHW"
    raise ValueError(f"{place}: its shape {tuple(shape)} does not say which axis is what")


def main(arguments: Sequence[str]) -> None:
    """The command."""
    if len(arguments) != 2:
        raise SystemExit("usage: python prepare.py FILE inputs.npy")
    told = json.loads(Path(__file__).with_name("medpfl.json").read_text(encoding="utf-8"))
    try:
        np.save(arguments[1], prepared(Path(arguments[0]), told))
    except (ValueError, OSError) as error:
        raise SystemExit(f"prepare.py: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
