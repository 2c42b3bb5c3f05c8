# SPDX-License-Identifier: Apache-2.0
"""A shell script whose ``medpfl`` commands run in this process: each process of its own would import PyTorch and MONAI
anew, for seconds. What such a command prints cannot be redirected by the script."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import pytest

from medpfl.cli import main

# Asks this process: how many arguments, the folder, the arguments, each closed by a zero byte; reads the exit code.
MEDPFL = """
medpfl() {
  local code
  printf '%s\\0' "$#" "$PWD" "$@" >&ASK
  read -r code <&ANSWER
  return "$code"
}
"""


def run_script(script: str, folder: Path, environment: Mapping[str, str]) -> int:
    """bash's exit code; whatever is printed goes to this process's standard output and error."""
    (asked, ask), (answer, answered) = os.pipe(), os.pipe()
    prelude = MEDPFL.replace("ASK", str(ask)).replace("ANSWER", str(answer))
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", prelude + script], cwd=folder, env=dict(environment), pass_fds=(ask, answer)
    )
    os.close(ask)
    os.close(answer)
    with open(asked, "rb") as requests, open(answered, "w", encoding="utf-8") as replies:
        while count := _text(requests):  # nothing more: bash has ended
            place, *arguments = [_text(requests) for _ in range(int(count) + 1)]
            print(_command(arguments, place), file=replies, flush=True)
    return process.wait()


def _text(file: BinaryIO) -> str:
    said = b""
    while (one := file.read(1)) not in (b"", b"\0"):
        said += one
    return said.decode()


def _command(arguments: list[str], folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["medpfl", *arguments])
        patch.chdir(folder)
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
