# SPDX-License-Identifier: Apache-2.0
"""What goes into a packed job of other people's packages: their code, and nothing else that lies beside it."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medpfl.flare.pack import pack
from medpfl.job import Job
from tools import write_job

CODE = """
from dataclasses import dataclass
from medpfl.methods.softpull import SoftPull

@dataclass(frozen=True)
class Ours(SoftPull):
    '''SoftPull by another name.'''
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code" / "our_methods"
    for name, text in {
        "ours.py": CODE,
        "inner/helper.py": "",
        "data/patients.csv": "Meier,1950",
        "notes.ipynb": "{}",
        ".env/token.py": "",
        "__pycache__/old.pyc": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "our_methods"]:
        del sys.modules[name]


@pytest.mark.parametrize("regular", [True, False])
def test_only_code_goes_in(regular: bool, package: Path, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """A table of patients beside the code went to every hospital; a package without __init__.py could not be packed."""
    if regular:
        (package / "__init__.py").touch()
    method = importlib.import_module("our_methods.ours").Ours
    said: list[str] = []
    folder = pack(write_job(make_job(method=method()), tmp_path / "job"), tmp_path / "packed", noticed=said.append)
    packed = folder / "app" / "custom" / "our_methods"
    found = {path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file()}
    assert found == {"ours.py", "inner/helper.py", *(["__init__.py"] if regular else [])}
    assert not (packed / "data").exists()
    assert (folder / "app" / "custom" / "medpfl" / "compare" / "report.html").is_file()
    left = "our_methods/data/patients.csv, our_methods/notes.ipynb"
    assert said == [f"only .py files of other packages go into a job; left out: {left}"]
