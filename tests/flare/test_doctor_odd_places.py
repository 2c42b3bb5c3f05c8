# SPDX-License-Identifier: Apache-2.0
"""A kit that names places which nobody can look at, and numbers beyond all processes: findings, no errors of Python's.

A name that is too long stands for a folder that this account may not enter, which root always may.
"""

import json
import shutil
from pathlib import Path

import pytest

from medpfl.core.errors import MedPFLError
from medpfl.flare.allow import allow
from medpfl.flare.doctor import examine
from medpfl.flare.finding import Finding
from medpfl.flare.home import ENVIRONMENT_VARIABLE, named_home
from medpfl.flare.provision import provision

ROOT = Path(__file__).parents[2]
ENDLESS = "/" + "x" * 300


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits")).folder
    for name in ("hospital-a", "server.example.org"):
        allow(folder / name)
    return folder


def said(kit: Path, check: str) -> list[Finding]:
    return [one for one in examine(kit) if one.check == check]


@pytest.mark.slow
def test_a_home_that_cannot_be_looked_at(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs ended with it, too."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, ENDLESS)
    (found,) = said(made / "hospital-a", "home")
    assert found.status == "problem" and f"'{ENDLESS}': File name too long" in found.text
    with pytest.raises(MedPFLError) as raised:
        named_home()
    assert raised.value.public == "MEDPFL_HOME names a folder that cannot be used: File name too long"


@pytest.mark.slow
def test_a_storage_that_cannot_be_looked_at(made: Path, tmp_path: Path) -> None:
    kit = shutil.copytree(made / "server.example.org", tmp_path / "kit")
    file = kit / "local" / "resources.json"
    content = json.loads(file.read_text())
    content["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = ENDLESS
    file.write_text(json.dumps(content))
    found = [one for one in said(kit, "storage") if ENDLESS in one.text]
    assert [one.status for one in found] == ["problem"] and "snapshots are to be kept in" in found[0].text


@pytest.mark.slow
@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000, "-5", "no number"])
def test_a_process_that_cannot_be(number: str, made: Path, tmp_path: Path) -> None:
    kit = shutil.copytree(made / "hospital-a", tmp_path / "kit")
    (kit / "pid.fl").write_text(number)
    assert said(kit, "left over") == []
