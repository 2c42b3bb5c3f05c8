# SPDX-License-Identifier: Apache-2.0
"""Broken images and masks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from broken_inputs.broken import Broken, Change, Group, cut, declared, holding, of_data, replaced, without
from hospitals import write_site
from pictures import MASKS, TABLE

SUFFIXES = ("png", "jpg", "tif", "ppm", "gif", "webp")
SIZE = (24, 20)


def write(folder: Path) -> None:
    """Twelve images of six formats, two a lesion, with masks and a table."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    lines = ["id,lesion,dx"]
    for number in range(12):
        mask = np.zeros(SIZE, np.uint8)
        mask[4:12, 6 : 10 + number % 4] = 255
        pixels = rng.integers(0, 200, (*SIZE, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"i{number:02}.{SUFFIXES[number % 6]}")
        Image.fromarray(mask).save(folder / "masks" / f"i{number:02}_mask.png")
        lines.append(f"i{number:02},l{number // 2},{('nv', 'mel')[number // 2 % 2]}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    write_site(folder, {"skin": {**TABLE, "files": "images/*"}})


def saved(name: str, pixels: Any, **options: Any) -> Change:
    """The file is another picture."""
    return lambda folder: Image.fromarray(np.asarray(pixels)).save(folder / name, **options)


def several(name: str) -> Change:
    """The file holds three pictures."""

    def change(folder: Path) -> None:
        pages = [Image.fromarray(np.full(SIZE, 40 * page, np.uint8)) for page in range(3)]
        pages[0].save(folder / name, save_all=True, append_images=pages[1:])

    return change


def named(number: int, suffix: str) -> str:
    return f"images/i{number:02}.{suffix}"


def enormous(folder: Path) -> None:
    """A PPM header that promises 90,000 x 90,000 pixels."""
    (folder / named(3, "ppm")).write_bytes(b"P6\n90000 90000\n255\n" + bytes(30))


MASK = "masks/i00_mask.png"
PNG, JPEG, TIFF, PPM, GIF, WEBP = (named(number, suffix) for number, suffix in enumerate(SUFFIXES))
Save = Callable[[Path], object]
GROUPS = [
    Group(
        "Images (PNG, JPEG, TIFF, PPM, GIF, WebP)",
        write,
        of_data,
        [
            Broken("PNG cut in the middle", PNG, cut(PNG)),
            Broken("PNG that is empty", PNG, holding(PNG, "")),
            Broken("PNG that is a web page", PNG, holding(PNG, "<html>404 not found</html>")),
            Broken("JPEG cut in the middle", JPEG, cut(JPEG)),
            Broken("JPEG without its end", JPEG, cut(JPEG, 0.95)),
            Broken("TIFF cut in the middle", TIFF, cut(TIFF)),
            Broken("TIFF of three pages", TIFF, several(TIFF)),
            Broken("TIFF of fractions", TIFF, saved(TIFF, np.full(SIZE, 0.5, np.float32))),
            Broken("PPM cut in the middle", PPM, cut(PPM)),
            Broken("PPM that promises 90,000 x 90,000 pixels", PPM, enormous),
            Broken("GIF cut in the middle", GIF, cut(GIF)),
            Broken("GIF that moves", GIF, several(GIF)),
            Broken("WebP cut in the middle", WEBP, cut(WEBP)),
            Broken("WebP with a broken header", WEBP, holding(WEBP, b"RIFF\0\0\0\0WEBPVP8 " + bytes(40))),
        ],
    ),
    Group(
        "Lists of images",
        write,
        of_data,
        [
            Broken("no file fits the pattern", "pictures/*", declared(files="pictures/*")),
            Broken("an image of the table is not there", "list.csv:2", without(PNG)),
            Broken("an image is listed twice", "list.csv:3", replaced("list.csv", "i01", "i00")),
            Broken("two files have one name", "list.csv:2", saved("images/i00.bmp", np.zeros(SIZE, np.uint8))),
            Broken("a class that is not declared", "list.csv:2", replaced("list.csv", "l0,nv", "l0,NV")),
            Broken("no patient is named", "list.csv:2", replaced("list.csv", "i00,l0", "i00,")),
        ],
    ),
    Group(
        "Masks",
        write,
        of_data,
        [
            Broken("an image without a mask", "list.csv:2", without(MASK)),
            Broken("another way to name masks", "list.csv:2", declared(masks={**MASKS, "suffix": "_seg"})),
            Broken("other proportions than the image", MASK, saved(MASK, np.zeros((20, 24), np.uint8))),
            Broken("a value that is not declared", MASK, saved(MASK, np.full(SIZE, 7, np.uint8))),
            Broken(
                "in colour",
                MASK,
                saved(MASK, np.dstack([np.zeros(SIZE), np.full(SIZE, 255), np.zeros(SIZE)]).astype(np.uint8)),
            ),
            Broken("cut in the middle", MASK, cut(MASK)),
        ],
    ),
]
