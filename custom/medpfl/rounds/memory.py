# SPDX-License-Identifier: Apache-2.0
"""How much memory models may take in this process; what does not fit lies in files."""

import mmap
import os
from pathlib import Path

import psutil

from medpfl.core.errors import ConfigError

WANTED = "MEDPFL_MEMORY"
"""Environment variable: MiB that models may take; 0: all lie in files. Not set: half of the memory that is free."""
_GROUP = Path("/sys/fs/cgroup")
"""Of a container: what it may take, and takes."""
_PAGES = Path("/proc/self/statm")
"""Of this process: all, then resident."""


def budget() -> int:
    """Bytes that models may take in this process.

    Raises:
        ConfigError: the environment says no whole number of at least 0.
    """
    said = os.environ.get(WANTED)
    if said is None:
        free: int = psutil.virtual_memory().available
        return min(free, _left_in_group(free)) // 2
    if not said.isdecimal():
        raise ConfigError(f"{WANTED} must be a whole number of MiB, got '{said}'")
    return int(said) * 2**20


def _left_in_group(free: int) -> int:
    """Of a container with a limit, what is left of it; elsewhere what is ``free``."""
    try:
        most, taken = ((_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return max(0, int(most) - int(taken))
    except (OSError, ValueError):  # there is no container, or no limit
        return free


def resident() -> int:
    """Bytes of memory that this process takes now. Asked after every answer of a hospital."""
    try:
        return int(_PAGES.read_bytes().split()[1]) * mmap.PAGESIZE  # a fifth of psutil's time
    except OSError:  # not Linux
        found: int = psutil.Process().memory_info().rss
        return found
