# SPDX-License-Identifier: Apache-2.0
"""A comparison's runs without its worker processes, for tests that are about something else: each process would import
PyTorch and all of the package anew."""

import importlib
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

_ONE_AT_A_TIME = threading.Lock()  # runs of one process share torch's global generator


class InProcess:
    """In ``subprocess.Popen``'s place: ``python -m MODULE FOLDER`` in this process, once it is waited for."""

    def __init__(self, command: list[str], stdout: TextIO, **options: object):
        self.module, self.folder = command[2:]
        self.log = stdout

    def wait(self) -> int:
        worker = importlib.import_module(self.module)
        with _ONE_AT_A_TIME:
            try:
                return int(worker.main(Path(self.folder)))
            except Exception:  # noqa: BLE001  as a process that dies of it
                traceback.print_exc(file=self.log)
                return 1

    def terminate(self) -> None:
        """It ends by itself."""


def without_workers(patch: pytest.MonkeyPatch) -> None:
    """The runner starts no processes."""
    patch.setattr("medpfl.compare.processes.subprocess", SimpleNamespace(Popen=InProcess))
