# SPDX-License-Identifier: Apache-2.0
"""Broken arrays and recordings."""

import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from broken_inputs.broken import Broken, Change, Group, cut, declared, holding, of_data, replaced, without
from hospitals import write_site

ARRAY = "a.npz"


def write_arrays(folder: Path) -> None:
    """Twelve pictures of six patients in one .npz file."""
    np.savez_compressed(folder / ARRAY, **content())
    declaration = {"kind": "arrays", "file": ARRAY, "classes": {"healthy": [0], "ill": [1]}}
    write_site(folder, {"a": {**declaration, "inputs": "x", "labels": "y", "split": {"group": "who"}}})


def content() -> dict[str, Any]:
    values = np.random.default_rng(1).normal(5, 3, (12, 6, 5, 3))
    return {"x": values, "y": np.arange(12) % 2, "who": np.arange(12) // 2}


def arrays(**changes: Any) -> Change:
    """The .npz file has other arrays; None takes one out."""

    def change(folder: Path) -> None:
        kept = {key: value for key, value in {**content(), **changes}.items() if value is not None}
        np.savez_compressed(folder / ARRAY, **kept)

    return change


def damaged(folder: Path) -> None:
    """A byte of the compressed values is another."""
    with zipfile.ZipFile(folder / ARRAY) as file:
        place = file.getinfo("x.npy").header_offset + 400
    data = bytearray((folder / ARRAY).read_bytes())
    data[place] ^= 255
    (folder / ARRAY).write_bytes(data)


def with_nan() -> Any:
    values = content()["x"]
    values[3, 0, 0, 0] = np.nan
    return values


def write_recordings(folder: Path) -> None:
    """Six recordings, a row for each of twelve time steps."""
    for number in range(6):
        rows = [f"{step},{step * number + 1},{1 if step < 6 else 4}" for step in range(12)]
        (folder / f"{'abcdef'[number]}.csv").write_text("\n".join(["x,y,act", *rows]) + "\n")
    declaration = {
        "kind": "series",
        "files": [f"{name}.csv" for name in "abcdef"],
        "channels": ["x", "y"],
        "label": {"column": "act", "classes": {"lying": [1], "walking": [4]}, "ignore": [0]},
        "window": {"length": 4, "step": 2},
    }
    write_site(folder, {"steps": declaration})


def sound(folder: Path) -> None:
    """A recording as a sound file."""
    with wave.open(str(folder / "heart.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(1000)
        file.writeframes(bytes(200))
    declared(files=["heart.wav"])(folder)


GROUPS = [
    Group(
        "Arrays (.npz)",
        write_arrays,
        of_data,
        [
            Broken("there is no such file", ARRAY, without(ARRAY)),
            Broken("a text", ARRAY, holding(ARRAY, "hello")),
            Broken("cut in the middle", ARRAY, cut(ARRAY)),
            Broken("damaged inside", ARRAY, damaged),
            Broken("an array is missing", ARRAY, arrays(y=None)),
            Broken("fewer labels than pictures", ARRAY, arrays(y=np.arange(9) % 2)),
            Broken("a class that is not declared", ARRAY, arrays(y=np.arange(12) % 3)),
            Broken("Python objects in place of numbers", ARRAY, arrays(x=np.array([object()] * 12))),
            Broken("values that are not finite", ARRAY, arrays(x=with_nan())),
            Broken("texts in place of numbers", ARRAY, arrays(x=np.array(["a"] * 12))),
        ],
    ),
    Group(
        "Recordings",
        write_recordings,
        of_data,
        [
            Broken("a sound file", "heart.wav", sound),
            Broken("a file is missing", "g.csv", declared(files=["a.csv", "g.csv"])),
            Broken("empty", "a.csv", holding("a.csv", "")),
            Broken("a channel is missing", "a.csv", replaced("a.csv", "x,y,act", "x,z,act")),
            Broken("a word where a number belongs", "a.csv:3", replaced("a.csv", "\n1,1,", "\none,1,")),
            Broken("an empty cell", "a.csv", replaced("a.csv", "\n1,1,", "\n,1,")),
            Broken("a row that is too short", "a.csv:3", replaced("a.csv", "\n1,1,1", "\n1,1")),
            Broken("a class that is not declared", "a.csv", replaced("a.csv", "\n1,1,1", "\n1,1,7")),
            Broken("shorter than a window", "steps", declared(window={"length": 40})),
        ],
    ),
]
