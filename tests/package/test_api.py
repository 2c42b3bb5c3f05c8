# SPDX-License-Identifier: Apache-2.0
"""The Python API: its names, that importing it costs nothing, and docs/python.md by its letter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import medpfl

ROOT = Path(__file__).resolve().parents[2]
CHECKS = """
assert set(result.scores) >= {"local", "fedavg", "personal"} and list(result.scores.index) == result.summary.roster
assert result.figures["curves"].startswith("<svg") and "mixing of model" in result.figures
tested = result.tests.query(
    "hospital == 'anna' and model == 'personal' and choice == 'best' and metric == 'accuracy'"
)
assert abs(model.evaluate("sites/anna.yaml")["accuracy"] - tested.value.item()) < 1e-9
assert {"Local", "FedAvg", "SoftPull"} <= set(compared.leaderboard.index)
again = medpfl.load_result("results/compare-cells")
assert again.leaderboard.equals(compared.leaderboard) and len(again.runs.query("method == 'SoftPull'")) == 1
"""


def test_public_names_and_their_types_are_the_same() -> None:
    stub = (ROOT / "custom" / "medpfl" / "__init__.pyi").read_text()
    typed = re.findall(r"^from ([\w.]+) import (\w+) as \2$", stub, flags=re.MULTILINE)
    assert {name for _, name in typed} == set(medpfl.__all__) - {"__version__"} <= set(dir(medpfl))
    for module, name in typed:
        assert getattr(medpfl, name) is not None, (module, name)
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        medpfl.simulated  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    """Every process of a job at a hospital imports it."""
    code = (
        "import sys; before = set(sys.modules); import medpfl; "
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['medpfl']"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import medpfl.compare.file", "pass"])
def test_the_package_compare_is_the_function_too(first: str) -> None:
    call = "try:\n    medpfl.compare({})\nexcept medpfl.MedPFLError as error:\n    print(error)"
    code = f"{first}\nimport medpfl\n{call}\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("comparison: 'name' is missing") == 2


@pytest.mark.slow
def test_the_page_by_its_letter(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    program = tmp_path / "page.py"
    program.write_text("\n".join([*blocks, CHECKS]))
    done = subprocess.run([sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
