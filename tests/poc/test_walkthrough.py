# SPDX-License-Identifier: Apache-2.0
"""docs/walkthrough.md by its letter: its commands, in their order, in a copy of the bundle with nothing else in it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

pytestmark = [pytest.mark.poc, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
# The environment is this one: the tests' own run installs it from the same files.
INSTALLATION = ("./poc/run --help", ". .venv/", "pip install")


def commands(page: Path) -> str:
    blocks = re.findall(r"(?:^    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line[4:] for block in blocks for line in block.splitlines()]
    return "\n".join(line for line in lines if not line.startswith(INSTALLATION))


def test_the_walkthrough(tmp_path: Path) -> None:
    for name in ("custom", "jobs", "poc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("meta.json", "requirements.txt", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    # The page's own job in fewer rounds: more of them show nothing more here.
    server = tmp_path / "jobs" / "softpull_phantom" / "app" / "config" / "config_fed_server.json"
    assert '"rounds": 12' in server.read_text()
    server.write_text(server.read_text().replace('"rounds": 12', '"rounds": 2'))
    script = commands(ROOT / "docs" / "walkthrough.md")
    assert script.count("medpfl ") >= 8 and "./poc/run softpull_phantom" in script
    script = script.replace("./poc/run", f"{sys.executable} -P -m medpfl poc run")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "The job softpull_phantom can run here" in done.stdout and "dice 0." in done.stdout
    assert (tmp_path / "walk" / "results" / "softpull_phantom" / "report.html").is_file()
    assert (tmp_path / "walk" / "sites" / "hospital-a.check.html").is_file()
    ours: Any = nib.load(tmp_path / "walk" / "predicted" / "hospital-c_test00.nii.gz")
    theirs: Any = nib.load(next((tmp_path / "walk" / "bundle" / "output").rglob("*.nii.gz")))
    np.testing.assert_allclose(ours.affine, theirs.affine)
    same = np.asarray(ours.dataobj) == np.asarray(theirs.dataobj)
    assert same.mean() > 0.999 and np.asarray(ours.dataobj).any()
