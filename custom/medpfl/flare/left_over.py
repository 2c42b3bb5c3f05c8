# SPDX-License-Identifier: Apache-2.0
"""What a machine that lost its power leaves in a kit, by which FLARE's start.sh would start nothing and say so nowhere
or in words that help nobody."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
from nvflare.apis.fl_constant import WorkspaceConstants

from medpfl.flare.finding import Finding, note, problem
from medpfl.flare.kits import Kit

_PROCESSES = ("daemon_pid.fl", "pid.fl")  # of FLARE's script, and of what it watches


def left_over(kit: Kit) -> Iterator[Finding]:
    """Files of FLARE's start script that do not belong to a site which runs."""
    check, runs = "left over", False
    for file in (kit.folder / name for name in _PROCESSES):
        process = _named(file)
        if process is None:
            continue
        if _of(kit.folder, process):
            runs = True
            continue
        text = f"process {process.pid} is another program by now, and start.sh would take it for this site"
        yield problem(check, f"{file} is of an earlier start: {text} and start nothing", f"rm {file}")
    asked = kit.folder / WorkspaceConstants.SHUTDOWN_FILE
    if asked.exists() and not runs:
        text = f"{asked} asks the site to end, which does not run: its next start may end after some seconds"
        yield note(check, text, f"rm {asked}")


def _named(file: Path) -> psutil.Process | None:
    """The process that FLARE's script would see by this file; None: it would see none, and go on."""
    try:
        number = int(file.read_text())
        os.kill(number, 0)  # as the script does
        return psutil.Process(number)
    except (OSError, ValueError, OverflowError, psutil.Error):
        return None


def _of(folder: Path, process: psutil.Process) -> bool:
    """Whether a process was started from this kit."""
    try:
        paths = [Path(part) for part in process.cmdline()]
    except psutil.Error:
        return False
    return any(path.is_absolute() and path.resolve().is_relative_to(folder) for path in paths)
