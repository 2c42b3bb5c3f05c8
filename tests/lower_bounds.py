#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The quick tests with the lowest version of every direct dependency that pyproject.toml allows.

    python3.11 tests/lower_bounds.py             # environment in a temporary folder, removed afterwards
    python3.11 tests/lower_bounds.py FOLDER      # kept there, and used again

What the direct dependencies need themselves is left to pip. Python's standard library is all that this file imports.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK = "not slow and not harness and not simulator and not poc"
TOOLS = ("pytest", "hypothesis", "hadolint", "ipykernel", "nbclient", "onnxruntime")
LOWEST = re.compile(r"([A-Za-z0-9._-]+)>=([0-9.]+)")


def wanted() -> str:
    """What is to be installed: ``name==version`` of every direct dependency, of the extra "all" too, and test tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (names,) = re.findall(r"\[(.+)\]", extras["all"][0])
    texts = [*project["dependencies"], *(text for name in names.split(",") for text in extras[name])]
    found = [LOWEST.match(text) for text in texts]
    lowest = [f"{one[1]}=={one[2]}" for one in found if one]
    assert len(lowest) == len(texts), "every dependency has a lower bound"
    return "\n".join([*lowest, *(text for text in extras["test"] if text.startswith(TOOLS))]) + "\n"


def try_in(folder: Path) -> int:
    """Install into ``folder``, unless that was done, and run the tests; pytest's exit code."""
    python, done, begun = folder / "bin" / "python", folder / "installed.txt", folder / "lowest.txt"
    if not done.exists() or done.read_text(encoding="utf-8") != wanted():
        venv.create(folder, with_pip=True, clear=True)
        begun.write_text(wanted(), encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", "-r", begun], check=True)
        begun.rename(done)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "custom"), "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", QUICK, "-n", "2", "--dist", "loadfile"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(try_in(Path(sys.argv[1]).resolve()))
    with tempfile.TemporaryDirectory(prefix="medpfl-lowest-") as scratch:
        sys.exit(try_in(Path(scratch)))
