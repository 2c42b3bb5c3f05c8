# SPDX-License-Identifier: Apache-2.0
"""The notebooks are run as a user runs them, every cell, each in a kernel of its own and an empty folder.

One line is another one here: the comparison takes one seed of the three, because every run is a process of its own."""

import asyncio
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
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


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT / "custom"), os.environ.get("PYTHONPATH")]))
    )
    (tmp_path / "work").mkdir()
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    if name == "own-method":
        (cell,) = [cell for cell in notebook.cells if "medpfl.compare(" in cell.source]
        assert '"seeds": [0, 1, 2]' in cell.source
        cell.source = cell.source.replace('"seeds": [0, 1, 2]', '"seeds": [0]')
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    client = NotebookClient(
        notebook, timeout=240, startup_timeout=180, resources={"metadata": {"path": tmp_path / "work"}}
    )
    asyncio.run(client.async_execute())
    printed = [text.text for cell in notebook.cells for text in cell.get("outputs", ()) if text.get("name") == "stderr"]
    assert not printed
