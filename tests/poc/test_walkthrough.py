# SPDX-License-Identifier: Apache-2.0
"""docs/walkthrough.md by its letter: its commands, in their order, in a copy of the bundle with nothing else in it."""

import os
import re
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from monai_command import BESIDE
from shell import run_script
from tools import deploy_to

pytestmark = [pytest.mark.poc, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
# The environment is this one: the tests' own run installs it from the same files.
INSTALLATION = ("./poc/run --help", ". .venv/", "pip install")


def commands(page: Path) -> str:
    blocks = re.findall(r"(?:^    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line[4:] for block in blocks for line in block.splitlines()]
    return "\n".join(line for line in lines if not line.startswith(INSTALLATION))


def beside(page: Path) -> Path:
    """Where ./tests/run puts what MONAI's own command needs, as the page says: not among the other packages, because
    MONAI imports ignite in every process that finds it, for seconds."""
    lies = {f"{one.name}=={one.version}" for one in distributions(path=[str(BESIDE)])}
    (pins,) = re.findall(r"^    pip install (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(pins.split()) <= lies, f"./tests/run puts {pins} into {BESIDE}; there is {lies or 'nothing'}"
    return BESIDE


def test_the_walkthrough(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("custom", "jobs", "poc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("meta.json", "requirements.txt", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    # The page's own job in fewer rounds and at two of its hospitals, each a process of its own: more show nothing more.
    job = deploy_to(tmp_path / "jobs" / "softpull_phantom", ["hospital-a", "hospital-c"])
    server = job / "app" / "config" / "config_fed_server.json"
    assert '"rounds": 12' in server.read_text()
    server.write_text(server.read_text().replace('"rounds": 12', '"rounds": 2, "finetune": 1'))
    page = ROOT / "docs" / "walkthrough.md"
    script = commands(page)
    assert script.count("medpfl ") >= 8 and "./poc/run softpull_phantom" in script
    assert script.count("hospital-b ") == 1
    script = script.replace("hospital-b ", "").replace("./poc/run", "medpfl poc run")
    path = os.pathsep.join(filter(None, (str(beside(page)), os.environ.get("PYTHONPATH"))))
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    code = run_script(script, tmp_path, {**os.environ, "PATH": search, "PYTHONPATH": path})
    said = capfd.readouterr()
    assert code == 0, said.out[-3000:] + said.err[-3000:]
    assert "The job softpull_phantom can run here" in said.out and "dice 0." in said.out
    assert (tmp_path / "walk" / "results" / "softpull_phantom" / "report.html").is_file()
    assert (tmp_path / "walk" / "sites" / "hospital-a.check.html").is_file()
    ours: Any = nib.load(tmp_path / "walk" / "predicted" / "hospital-c_test00.nii.gz")
    theirs: Any = nib.load(next((tmp_path / "walk" / "bundle" / "output").rglob("*.nii.gz")))
    np.testing.assert_allclose(ours.affine, theirs.affine)
    same = np.asarray(ours.dataobj) == np.asarray(theirs.dataobj)
    assert same.mean() > 0.999 and np.asarray(ours.dataobj).any()
