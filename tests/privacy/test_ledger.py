# SPDX-License-Identifier: Apache-2.0
"""A hospital's account of its noise on the disk. What it counts is in tests/rounds/test_privacy.py."""

import os
import stat
from pathlib import Path

import pytest

from medpfl.privacy import ClippedNoise
from medpfl.privacy.ledger import FILE, Ledger


def test_what_was_counted_is_on_the_disk_before_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and its name: when the power fails, a file system may put back the one of before."""
    done: list[str] = []
    replace_file = os.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    def replaced(old: Path, new: Path) -> None:
        replace_file(old, new)
        done.append(new.name)

    ledger = Ledger(tmp_path / "small", "anna")
    ledger.open()
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with ledger.alone():
        ledger.release([ClippedNoise(clip=0.1, noise_multiplier=6.0).mechanism()], "update")
    assert done == ["file", FILE, "folder"]
