# SPDX-License-Identifier: Apache-2.0
"""What MONAI's own command needs, pytorch-ignite above all, lies beside the other packages: MONAI imports ignite in
every process that finds it, for seconds. ``tests/run`` puts it there."""

import os
import subprocess
import sys
from pathlib import Path

BESIDE = Path(sys.prefix) / "monai-command"


def run_python(arguments: list[str], folder: Path) -> str:
    """What Python prints, in a process that finds those packages. AssertionError: it failed."""
    path = os.pathsep.join(filter(None, (str(BESIDE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
