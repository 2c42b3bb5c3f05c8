# SPDX-License-Identifier: Apache-2.0
"""Files and folders that an older system named in Latin-1: what could not be written later is refused at once."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.compare.orders import FoldOrder
from medpfl.compare.runner import write_order
from medpfl.core.errors import MedPFLError
from medpfl.rounds.lock import StateLock

LATIN = os.fsdecode(b"h\xe4user")


def site_file(folder: Path, name: str) -> Path:
    """A hospital with images of two classes, each in its folder."""
    for value in ("no", "yes"):
        (folder / value).mkdir(parents=True)
        for number in range(6):
            file = folder / value / f"{name}{number}.png"
            Image.fromarray(np.full((8, 8), 9 * number, dtype=np.uint8)).save(file)
    label = {"column": "class", "classes": {"no": ["no"], "yes": ["yes"]}}
    declared = {"kind": "images", "files": ["{class}/*.png"], "channels": 1, "label": label}
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"d": declared}}))
    return folder / "site.yaml"


def test_files_are_named(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["check-data", str(site_file(tmp_path, LATIN)), "--page", str(tmp_path / "p.html")])
    assert told.exit_code == 1 and isinstance(told.exception, SystemExit)
    assert "h\\udce4user" in told.output and "the file's name is not in UTF-8" in " ".join(told.output.split())


def test_a_folder_is_no_hindrance_to_the_check(tmp_path: Path) -> None:
    file = site_file(tmp_path / LATIN, "scan")
    told = CliRunner().invoke(app, ["check-data", str(file), "--page", str(tmp_path / "p.html")])
    assert told.exit_code == 0, told.output
    assert "h\\udce4user" in (tmp_path / "p.html").read_text()


def test_where_nothing_could_be_read_back_nothing_begins(tmp_path: Path) -> None:
    with pytest.raises(MedPFLError, match="has a name that is not in UTF-8") as error:
        StateLock().take(tmp_path / LATIN, "at anna")
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in str(error.value.public)


def test_a_comparison_says_that_its_runs_could_not_name_such_a_site_file(tmp_path: Path) -> None:
    """Every run failed: its order "was altered or is of another version", and why it failed could not be written."""
    plan: Any = SimpleNamespace(site_files={"anna": tmp_path / LATIN / "anna.yaml"})
    order = FoldOrder(job="j", without="anna", settings={}, components={}, method={}, task={}, splits={}, min_clients=2)
    run: Any = SimpleNamespace(digest="0123", order=order)
    with pytest.raises(MedPFLError, match="has a name that is not in UTF-8") as error:
        write_order(run, plan, tmp_path / "results")
    assert "h\\udce4user" in str(error.value) and not (tmp_path / "results").exists()
