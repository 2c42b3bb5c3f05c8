# SPDX-License-Identifier: Apache-2.0
"""The notebooks are run, every cell, each in an empty folder: one in a kernel, as a user runs it, the others by IPython
in this process, where every import is done already.

Two things are other ones here: the comparison takes one seed of the three, and only one of its runs, of the notebook's
own method, is done in a process of its own."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO, TypeAlias

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from traitlets.config import Config

from medpfl.compare import processes
from no_workers import InProcess

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
Process: TypeAlias = "InProcess | subprocess.Popen[str]"
CHECKS = {
    "first-federation": """
assert set(result.scores) >= {"local", "fedavg", "personal"} and list(result.scores.index) == result.summary.roster
assert result.figures["curves"].startswith("<svg") and "mixing of model" in result.figures
tested = result.tests.query(
    "hospital == 'anna' and model == 'personal' and choice == 'best' and metric == 'accuracy'"
)
assert abs(model.evaluate("sites/anna.yaml")["accuracy"] - tested.value.item()) < 1e-9
assert len(predicted) == 8 and result.scores["personal"].min() > 0.8
""",
    "own-data": """
assert all(check.passed for check in checks.values()) and len(problems) == 1 and "broken.png" in problems[0]
assert checks["berta"].write_page("berta.html").stat().st_mode & 0o077 == 0
assert result.scores["personal"].min() > 0.8 and set(predicted.predicted) <= {"zero", "one", "two"}
""",
    "own-method": """
assert list(result.scores.index) == ["anna", "berta", "clara"]
assert result.scores.loc["clara", "personal"] > result.scores.loc["clara", "fedavg"] + 0.2
assert "HomeLayer" in compared.hospitals.index and list(compared.hospitals) == ["anna", "berta", "clara"]
assert len(compared.leaderboard) >= 4
""",
}


def test_they_are_stored_without_what_they_printed() -> None:
    assert {file.stem for file in NOTEBOOKS} == set(CHECKS)
    for file in NOTEBOOKS:
        notebook = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        assert not [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
        assert not [cell.id for cell in notebook.cells if cell.metadata.get("tags")]  # one leaves a cell out


def run_in_a_kernel(notebook: nbformat.NotebookNode, folder: Path, patch: pytest.MonkeyPatch) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        patch.setenv(variable, str(folder.parent / "jupyter"))
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT / "custom"), os.environ.get("PYTHONPATH")])))
    client = NotebookClient(notebook, timeout=240, startup_timeout=180, resources={"metadata": {"path": folder}})
    asyncio.run(client.async_execute())
    printed = [text.text for cell in notebook.cells for text in cell.get("outputs", ()) if text.get("name") == "stderr"]
    assert not printed


def one_of_its_own() -> Callable[..., Process]:
    """What starts the comparison's runs: the first of the notebook's method as it is."""
    started = []

    def start(command: list[str], stdout: TextIO, stderr: TextIO, env: Mapping[str, str], **options: object) -> Process:
        order = json.loads(Path(command[3], "order.json").read_text())
        if not started and "home_layer" in json.dumps(order):
            started.append(command)
            return subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, env=env)
        return InProcess(command, stdout)

    return start


def run_here(notebook: nbformat.NotebookNode, folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("IPYTHONDIR", str(folder.parent / "ipython"))
    patch.chdir(folder)
    patch.syspath_prepend("")  # as in a kernel
    patch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # IPython sets its own
    patch.setattr(processes, "subprocess", SimpleNamespace(Popen=one_of_its_own()))
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        with redirect_stderr(io.StringIO()) as printed:
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    shell.run_cell(cell.source).raise_error()
    finally:
        InteractiveShell.clear_instance()
        sys.modules.pop("home_layer", None)
    assert not printed.getvalue()


def test_predictions_of_one_are_not_in_the_way_of_the_next() -> None:
    """Jupyter runs all of them in the folder in which they lie, and no prediction is written over another."""
    folders = [
        folder
        for file in NOTEBOOKS
        for cell in nbformat.read(file, as_version=4).cells
        for folder in re.findall(r"\.predict\([^)]*, \"([^\"]+)\"\)", cell.source)
    ]
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert len(folders) == len(set(folders)) == 2 and all(f"`{folder}`" in page for folder in folders)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.usefixtures("rendered")
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    if name == "own-method":
        (cell,) = [cell for cell in notebook.cells if "medpfl.compare(" in cell.source]
        assert '"seeds": [0, 1, 2]' in cell.source
        cell.source = cell.source.replace('"seeds": [0, 1, 2]', '"seeds": [0]')
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    if name == "first-federation":
        run_in_a_kernel(notebook, folder, monkeypatch)
        told = set(re.findall("`([^`]+)`", notebook.cells[0].source))
        assert {path.name for path in folder.iterdir()} <= told  # it says what it writes
    else:
        run_here(notebook, folder, monkeypatch)
