# SPDX-License-Identifier: Apache-2.0
"""Processes of their own that have imported everything already: copies of the test's process. A new one would import
PyTorch and all of the package anew, for seconds. Not for what needs threads that this process began (Dask's): a copy
has none."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Forked:
    """Does ``what`` in a copy of this process, whose output goes into the file ``log``. Whatever it changes (modules,
    the environment, the working folder) ends with it. Its code and message are read by ``ended``."""

    def __init__(self, what: Callable[[], object], log: Path):
        self._log = log
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            self._child(what)

    def _child(self, what: Callable[[], object]) -> NoReturn:
        code = 1
        try:
            written = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(written, 1)
            os.dup2(written, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            what()
            code = 0
        except BaseException:  # noqa: BLE001  as a process that dies of it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # what this process cleans up at its end belongs to the other

    def ended(self) -> str:
        """What it wrote, once it has ended. AssertionError: it failed."""
        try:
            _, status = os.waitpid(self._pid, 0)
        except BaseException:  # the test's time is over
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            raise
        said = self._log.read_text(encoding="utf-8")
        assert status == 0, said
        return said


class _Absent:
    """Finds no module of some packages."""

    def __init__(self, packages: tuple[str, ...]):
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def forget(*packages: str) -> None:
    """These packages are as if nothing had imported them."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def without(*packages: str) -> None:
    """These packages are as if they were not installed."""
    forget(*packages)
    sys.meta_path.insert(0, _Absent(packages))  # type: ignore[arg-type]  # it only refuses
