# SPDX-License-Identifier: Apache-2.0
"""Hidden files are nobody's data: those that Macs put beside others, and older states that notebooks keep."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from hospitals import save, scan
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file

FORK = bytes.fromhex("00051607") + bytes(60)
"""How such a file of a Mac begins."""


def volumes(folder: Path, number: int) -> list[Path]:
    image, label = scan(number)
    files = [folder / kind / f"s{number}.nii.gz" for kind in ("imagesTr", "labelsTr")]
    for file, values in zip(files, (image, label), strict=True):
        save(file, values)
    return files


def pictures(folder: Path, number: int) -> list[Path]:
    files = [folder / kind / f"{number}.png" for kind in ("hand", "chest")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(file)
    return files


def recordings(folder: Path, number: int) -> list[Path]:
    file = folder / f"p{number}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{0.1 * step + number},{step % 2}" for step in range(30)]
    file.write_text("\n".join(["x,state", *rows]) + "\n")
    return [file]


@pytest.mark.parametrize("make", [volumes, pictures, recordings])
def test_hidden_files_change_nothing(make: Callable[[Path, int], list[Path]], tmp_path: Path) -> None:
    folder, proposed = tmp_path / "data", []
    files = [file for number in range(4) for file in make(folder, number)]
    for name in ("plain", "hidden"):
        if name == "hidden":
            for file in files:
                packed = folder / "__MACOSX" / file.relative_to(folder)
                older = file.parent / ".ipynb_checkpoints" / file.name
                for other in (packed, older):
                    other.parent.mkdir(parents=True, exist_ok=True)
                older.write_bytes(file.read_bytes())
                for other in (file, packed):
                    other.with_name(f"._{file.name}").write_bytes(FORK)
            (folder / ".ipynb_checkpoints").mkdir(exist_ok=True)
            (folder / ".ipynb_checkpoints" / files[0].name).write_bytes(files[0].read_bytes())
        output = tmp_path / f"{name}.yaml"
        write_site_file(
            folder, output, Answers({"site": "here", "dataset": "data", "label": "state", "patient": "file"})
        )
        dataset = yaml.safe_load(output.read_text())["datasets"]["data"]
        listed = tmp_path / str(dataset.pop("datalist", "none"))
        proposed.append((dataset, json.loads(listed.read_text()) if listed.is_file() else None))
    assert proposed[0] == proposed[1]
