# SPDX-License-Identifier: Apache-2.0
"""What is to be predicted, as ``medpfl site init`` finds it in tables beside images and in arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from medpfl.check.reading import inspect
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file


def init(place: Path, output: Path, **flags: str) -> dict[str, Any]:
    """The declared dataset; its data are sound."""
    write_site_file(place, output, Answers({"site": "here", "dataset": "data", **flags}))
    assert not inspect("data", load_site_file(output, "here").datasets["data"]).problems
    dataset: dict[str, Any] = yaml.safe_load(output.read_text())["datasets"]["data"]
    return dataset


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_of_images_that_says_nothing_but_their_classes(tmp_path: Path, ending: str) -> None:
    """More than twenty images were refused, for there was "no column left" to predict the class from; a Parquet table
    was not looked at."""
    (tmp_path / "d").mkdir()
    for number in range(30):
        Image.fromarray(np.full((6, 6), number, np.uint8)).save(tmp_path / "d" / f"{number}.png")
    rows = pd.DataFrame({"image": [f"{number}.png" for number in range(30)], "dx": ["a", "b"] * 15})
    if ending == "csv":
        rows.to_csv(tmp_path / "d" / "t.csv", index=False)
    else:
        rows.to_parquet(tmp_path / "d" / "t.parquet")
    found = init(tmp_path / "d", tmp_path / "site.yaml", label="dx")
    assert found["label"] == {"column": "dx", "classes": {"a": ["a"], "b": ["b"]}}
    assert found["table"] == {"file": f"d/t.{ending}", "image": "image"}


def test_arrays_with_a_number_to_predict(tmp_path: Path) -> None:
    """Each number was proposed as a class."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.integers(0, 255, (40, 6, 6), np.uint8), days=rng.random(40))
    found = init(tmp_path / "a.npz", tmp_path / "site.yaml")
    assert found["value"] == "days" and "classes" not in found and "labels" not in found


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_16_bits_in_either_byte_order_is_no_colour(tmp_path: Path, order: str) -> None:
    for number in range(12):
        folder = tmp_path / "d" / ("ill", "well")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 65536, (6, 6))
        Image.fromarray(values.astype(order)).save(folder / f"{number}.tif")
    assert init(tmp_path / "d", tmp_path / "site.yaml")["channels"] == 1
