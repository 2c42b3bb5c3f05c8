# SPDX-License-Identifier: Apache-2.0
"""Whose the files of a kit are, and who may look into it."""

import os
import shutil
from pathlib import Path

import pytest

from medpfl.flare.allow import allow
from medpfl.flare.doctor import examine
from medpfl.flare.finding import Finding
from medpfl.flare.provision import provision

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits")).folder / "hospital-a"
    allow(folder)
    return folder


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(made, tmp_path / "kit")


def said(kit: Path) -> list[Finding]:
    return [one for one in examine(kit) if one.check == "permissions"]


@pytest.mark.slow
def test_a_kit_that_others_may_look_into(kit: Path) -> None:
    """Its logs name paths and data of the hospital; a copy that was made without modes is open."""
    for mode, told in ((0o700, False), (0o755, True), (0o710, True), (0o704, True)):
        kit.chmod(mode)
        notes = [one for one in said(kit) if "may look into" in one.text]
        assert [(one.status, one.mend) for one in notes] == [("note", f"chmod 700 {kit}, unless they should")] * told


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_what_another_user_has_left_or_put_back(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that was started once as root, or whose models root has put back, can write neither log nor state."""
    state = kit / "medpfl" / "heart" / "state"
    state.mkdir(parents=True)
    (kit / "log.txt").touch()
    assert [one.status for one in said(kit)] == ["ok"]
    theirs = {str(kit / "local" / "hospital-a.yaml"), str(kit / "log.txt"), str(state)}
    (kit / "local" / "hospital-a.yaml").touch()  # the data steward's
    for path in theirs:
        os.chown(path, 12345, -1)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in theirs or mode == os.R_OK)
    (found,) = said(kit)
    assert found.status == "problem" and f"{kit / 'log.txt'} belongs to user 12345" in found.text
    assert "(2 such places)" in found.text and found.mend == f"chown -R {os.getuid()} {kit}"
