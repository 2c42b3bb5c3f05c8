# SPDX-License-Identifier: Apache-2.0
"""A project file that is changed after kits were made of it: certificates that were issued stay as they are."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from medpfl.cli import main
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.flare.provision import provision

PROJECT = Path(__file__).resolve().parents[2] / "poc" / "project.yml"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits")
    provision(PROJECT, folder)
    return folder


def change_of(name: str, **said: str) -> Callable[[list[dict[str, Any]]], None]:
    def change(participants: list[dict[str, Any]]) -> None:
        next(one for one in participants if one["name"] == name).update(said)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            change_of("hospital-b", org="clinic_b"),
            "hospital-b: 'org' is 'clinic_b', and the certificate that was issued says 'hospital_b'",
        ),
        (
            change_of("lead@hospital-a.example.org", org="hospital_z"),
            "lead@hospital-a.example.org: 'org' is 'hospital_z', and .* says 'hospital_a', which counts",
        ),
        (
            change_of("lead@hospital-a.example.org", role="member"),
            "'role' is 'member', and the certificate that was issued says 'lead'",
        ),
    ],
)
def test_who_has_a_certificate_gets_no_other_organisation_or_role(
    kits: Path, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    """The table of kits said 'lead of hospital_z', and the kit went on acting for hospital_a; of another role FLARE
    said that the existing workspace, which holds the root's key, was to be deleted."""
    project = yaml.safe_load(PROJECT.read_text())
    change(project["participants"])
    file = tmp_path / "project.yml"
    file.write_text(yaml.safe_dump(project))
    before = sorted((kits / "medpfl").glob("prod_*"))
    with pytest.raises(ConfigError, match=words):
        provision(file, kits)
    assert sorted((kits / "medpfl").glob("prod_*")) == before


def test_who_is_new_may_have_any(kits: Path, tmp_path: Path) -> None:
    project = yaml.safe_load(PROJECT.read_text())
    project["participants"].append({"name": "hospital-e", "type": "client", "org": "clinic_e"})
    file = tmp_path / "project.yml"
    file.write_text(yaml.safe_dump(project))
    assert provision(file, kits).people[-1].org == "clinic_e"


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    state = tmp_path / "medpfl" / "state" / "cert.json"
    state.parent.mkdir(parents=True)
    state.write_text("{")
    with pytest.raises(MedPFLError, match=r"cert\.json, the state of earlier provisioning, cannot be read"):
        provision(PROJECT, tmp_path)


def test_kits_of_another_address_are_told(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It said that kits handed out earlier stay valid, which look for the server where it is no more."""
    project = yaml.safe_load(PROJECT.read_text())
    shutil.copytree(kits, tmp_path / "kits")
    names = [one["name"] for one in project["participants"]]
    file = tmp_path / "project.yml"
    for change, told in (
        ({}, []),
        ({"fed_learn_port": 8102, "admin_port": 8102}, names),
        ({"default_host": "a.org"}, names[1:]),
    ):
        project["participants"][0].update(change)
        file.write_text(yaml.safe_dump(project))
        made = provision(file, tmp_path / "kits")
        assert sorted(made.moved) == sorted(told)
    monkeypatch.setattr("sys.argv", ["medpfl", "provision", "-o", str(tmp_path / "kits")])
    with pytest.raises(SystemExit):
        main()
    said = " ".join(capfd.readouterr().out.split())
    assert "kits handed out earlier stay valid; but those of server.example.org, hospital-a" in said
