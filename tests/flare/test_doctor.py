# SPDX-License-Identifier: Apache-2.0
"""The doctor on real kits, each broken in one way: it names the problem and the mend, and the exit code is 1."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.data.site_file import ENVIRONMENT_VARIABLE, load_site_file
from medpfl.flare.allow import allow, forbid_code
from medpfl.flare.common_key import common_key
from medpfl.flare.doctor import examine, python
from medpfl.flare.finding import Finding
from medpfl.flare.home import ENVIRONMENT_VARIABLE as HOME_VARIABLE
from medpfl.flare.kits import read_kit
from medpfl.flare.provision import Provisioned, fingerprint, provision
from medpfl.privacy.keys import make_key
from reissued import reissue
from small_jobs import write_table_sites

ROOT = Path(__file__).resolve().parents[2]
NAME = "hospital-a"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    """Kits with nothing wrong but that nobody listens at the server's port."""
    folder = tmp_path_factory.mktemp("doctor")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    project = yaml.safe_load((ROOT / "poc" / "project.yml").read_text())
    project["participants"][0].update(fed_learn_port=port, admin_port=port)
    (folder / "project.yml").write_text(yaml.safe_dump(project))
    made = provision(folder / "project.yml", folder / "kits")
    for name in (NAME, "server.example.org"):
        allow(made.folder / name)
    forbid_code(made.folder / NAME)
    file = write_table_sites(folder / "data", [NAME])[NAME]
    content = yaml.safe_load(file.read_text())
    content["datasets"]["blood"]["files"] = [str(folder / "data" / f"{NAME}.csv")]
    (made.folder / NAME / "local" / f"{NAME}.yaml").write_text(yaml.safe_dump(content))
    return made


@pytest.fixture
def kit(made: Provisioned, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(made.folder / NAME, tmp_path / "kit")
    return tmp_path / "kit"


def problems(kit: Path) -> dict[str, Finding]:
    found = {finding.check: finding for finding in examine(kit) if finding.status == "problem"}
    assert all(finding.mend for finding in found.values())
    return found


@pytest.mark.slow
def test_a_processor_on_which_the_library_damages_memory(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for best, version, warned in (("AVX2", "2.13.0+cpu", True), ("AVX512", "2.13.0", False), ("AVX2", "2.14.0", False)):
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda best=best: best)
        monkeypatch.setattr(torch, "__version__", version)
        found = [finding for finding in examine(kit) if finding.check == "processor"]
        assert bool(found) is warned
        assert all(one.status == "note" and "kernel of 1, a stride of 2" in one.text and one.mend for one in found)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def listed(kit: Path, change: Callable[[list[str]], list[str]]) -> None:
    file = kit / "local" / "resources.json"
    edit(file, class_allow_list=change(json.loads(file.read_text())["class_allow_list"]))


def security(kit: Path) -> None:
    file = kit / "startup" / "fed_client.json"
    edit(file, client={**json.loads(file.read_text())["client"], "connection_security": "clear"})


def site_file(kit: Path, text: str) -> None:
    (kit / "local" / f"{NAME}.yaml").write_text(text)


def unsupervise(kit: Path) -> None:
    default = json.loads((kit / "local" / "resources.json.default").read_text())
    edit(kit / "local" / "resources.json", components=default["components"])


def data_file(kit: Path) -> None:
    file = kit / "local" / f"{NAME}.yaml"
    file.write_text(file.read_text().replace(".csv", ".lost"))


def other_kit(kit: Path, made: Provisioned, *names: str) -> None:
    for name in names:
        shutil.copy(made.folder / "hospital-b" / "startup" / name, kit / "startup" / name)


# What is done to the kit; the check that finds it; words of the problem; words of the mend.
BROKEN: dict[str, tuple[Callable[[Path, Provisioned], object], str, str, str]] = {
    "key readable by the group": (
        lambda kit, made: (kit / "startup" / "client.key").chmod(0o640),
        "permissions", "others may read the private key", "chmod 600",
    ),
    "key missing": (
        lambda kit, made: (kit / "startup" / "client.key").unlink(),
        "permissions", "private key", "kit again",
    ),
    "local writable by the group": (
        lambda kit, made: (kit / "local").chmod(0o775), "permissions", "others may write to", "chmod go-w",
    ),
    "certificate missing": (
        lambda kit, made: (kit / "startup" / "client.crt").unlink(), "certificates", "client.crt: No such", "new kit",
    ),
    "certificate damaged": (
        lambda kit, made: (kit / "startup" / "client.crt").write_text("x"), "certificates", "is damaged", "new kit",
    ),
    "certificate expired": (
        lambda kit, made: reissue(kit, made, -20, -3), "certificates", "client.crt expired on 2", "new kit",
    ),
    "certificate of tomorrow": (
        lambda kit, made: reissue(kit, made, 1, 20), "certificates", "is valid only from", "clock",
    ),
    "certificate of another hospital": (
        lambda kit, made: other_kit(kit, made, "client.crt", "client.key"),
        "certificates", "issued to hospital-b, the kit is 'hospital-a'", "new kit",
    ),
    "key of another hospital": (
        lambda kit, made: other_kit(kit, made, "client.key"),
        "certificates", "client.key is not the key of client.crt", "new kit",
    ),
    "no encryption": (
        lambda kit, made: security(kit), "certificates", "is 'clear', expected 'mtls'", "new kit",
    ),
    "no allow list": (
        lambda kit, made: (kit / "local" / "resources.json").unlink(), "allow list", "there is no", "medpfl site allow",
    ),
    "prefix": (
        lambda kit, made: listed(kit, lambda names: [*names, "torch."]), "allow list", "torch.: a prefix", "remove it",
    ),
    "function": (
        lambda kit, made: listed(kit, lambda names: [*names, "subprocess.run"]),
        "allow list", "subprocess.run (it is not a class)", "remove it",
    ),
    "class missing": (
        lambda kit, made: listed(kit, lambda names: [name for name in names if not name.endswith("SoftPull")]),
        "allow list", "medpfl.core.mixers.SoftPull and", "medpfl site allow",
    ),
    "list not enforced": (
        lambda kit, made: edit(kit / "local" / "resources.json", class_list_enforcement_mode="warn"),
        "allow list", "is 'warn'", "medpfl site allow",
    ),
    "list damaged": (
        lambda kit, made: (kit / "local" / "resources.json").write_text("{"), "allow list", "not valid JSON", "remove",
    ),
    "list of another form": (
        lambda kit, made: edit(kit / "local" / "resources.json", components="none"), "allow list",
        "'components': input should be a valid array", "remove",
    ),
    "set up by an earlier MedPFL": (
        lambda kit, made: unsupervise(kit), "supervision", "FLARE ends the whole job, at all hospitals", "site allow",
    ),
    "logs are sent": (
        lambda kit, made: edit(kit / "local" / "resources.json", allow_log_streaming=True),
        "privacy", "sends this site's error log", "medpfl site allow",
    ),
    "files can be read": (
        lambda kit, made: (kit / "local" / "authorization.json").unlink(),
        "privacy", "lead and org_admin and project_admin may read files", "medpfl site allow",
    ),
    "no policy": (
        lambda kit, made: [file.unlink() for file in (kit / "local").glob("authorization.*")],
        "code in jobs", "authorization.json.default", "kit again",
    ),
    "no site file": (
        lambda kit, made: (kit / "local" / f"{NAME}.yaml").unlink(), "site file", "no site file for", "site-files.md",
    ),
    "wrong site file": (
        lambda kit, made: site_file(kit, "datasets: {a: {kind: scan}}"), "site file", "got 'scan'", "site-files.md",
    ),
    "another hospital's site file": (
        lambda kit, made: site_file(kit, (kit / "local" / f"{NAME}.yaml").read_text().replace(NAME, "hospital-b")),
        "site file", "the site file of 'hospital-b', but this hospital is 'hospital-a'", "site-files.md",
    ),
    "data missing": (
        lambda kit, made: data_file(kit), "data", "dataset 'blood': cannot read", "copy what lay beside the site file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.slow
def test_a_broken_kit(kit: Path, made: Provisioned, name: str) -> None:
    breaks, check, words, mend = BROKEN[name]
    assert problems(kit).keys() == {"server"}  # nobody listens; nothing else is wrong
    breaks(kit, made)
    found = problems(kit)
    assert check in found and words in found[check].text and mend in found[check].mend, found
    also = {"key missing": {"certificates"}, "no allow list": {"privacy", "supervision"}}
    expected = {check, "server"} | also.get(name, set())
    assert found.keys() | {"server"} == expected


@pytest.mark.slow
def test_the_command_prints_a_line_each_and_exits_with_1(kit: Path) -> None:
    (kit / "local" / "resources.json").unlink()
    result = CliRunner().invoke(app, ["site", "doctor", str(kit)])
    assert result.exit_code == 1 and result.output.splitlines()[-1] == "4 problem(s) to mend"
    lines = result.output.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("PROBLEM allow list"))
    assert lines[at + 1].strip() == f"mend: medpfl site allow {kit}"
    result = CliRunner().invoke(app, ["site", "doctor", str(kit.parent)], catch_exceptions=True)
    assert "is not a startup kit" in str(result.exception)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Something that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.slow
def test_the_ways_not_to_reach_the_server(kit: Path, silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medpfl.flare.identity.CONNECT_TIMEOUT", 0.5)
    file = kit / "startup" / "fed_client.json"
    servers = json.loads(file.read_text())["servers"]
    for target, words, mend in (
        (f"localhost:{read_kit(kit).port}", "nothing listens", "whether the server runs"),
        ("server.invalid:8002", "the name server.invalid is not known here", "DNS"),
        (f"localhost:{silent_port}", "does not answer within 0.5 seconds", "allow outgoing TCP"),
    ):
        servers[0]["service"]["target"] = target
        edit(file, servers=servers)
        found = problems(kit)["server"]
        assert words in found.text and mend in found.mend


@pytest.mark.slow
def test_other_kits(made: Provisioned, tmp_path: Path, silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    person = list(examine(made.folder / "lead@hospital-a.example.org"))
    assert any("needs no site file" in finding.text for finding in person)
    assert not {finding.check for finding in person} & {"site file", "allow list", "code in jobs", "memory"}
    server = tmp_path / "server"
    shutil.copytree(made.folder / "server.example.org", server)
    assert "was the kit moved?" in str(problems(server)["storage"]) or not problems(server)
    allow(server)
    found = list(examine(server))
    assert not problems(server) and "site file" not in {finding.check for finding in found}
    assert any(finding.text.startswith("jobs are kept in " + str(server)) for finding in found)
    (server / "local" / "resources.json").unlink()
    assert "as RUNNING for ever" in problems(server)["supervision"].text
    assert "which a restart of the machine empties" in problems(server)["storage"].text
    monkeypatch.setattr("medpfl.flare.identity.CONNECT_TIMEOUT", 0.5)
    file = server / "startup" / "fed_server.json"
    file.write_text(file.read_text().replace(f":{read_kit(server).port}", f":{silent_port}"))
    assert "not by this server" in problems(server)["server"].text


@pytest.mark.slow
def test_notes(kit: Path, made: Provisioned, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not keep the site from running, but should be known."""
    reissue(kit, made, -1, 10)
    (kit / "local" / "authorization.json").unlink()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(kit / "local"))
    found = {finding.check: finding for finding in examine(kit)}
    assert found["certificates"].status == "note" and "valid for 9 more days" in found["certificates"].text
    assert found["root"].text.endswith(fingerprint(made.root))
    assert "jobs of lead and project_admin may bring Python code" in found["code in jobs"].text
    assert "medpfl site forbid-code" in found["code in jobs"].mend
    assert "start.sh runs python3, which is not there" in found["PATH"].text
    assert "start.sh must run with the same environment" in found["site file"].text


def test_the_privacy_scope_names_the_site_file_first(kit: Path, tmp_path: Path) -> None:
    (kit / "local" / f"{NAME}.yaml").rename(tmp_path / "elsewhere.yaml")
    scope = {"name": "research", "properties": {"site_file": str(tmp_path / "elsewhere.yaml")}}
    (kit / "local" / "privacy.json").write_text(json.dumps({"scopes": [scope], "default_scope": "research"}))
    found = next(finding for finding in examine(kit) if finding.check == "site file")
    assert found.text == f"{tmp_path / 'elsewhere.yaml'} (of the privacy scope 'research')"


@pytest.mark.slow
def test_the_key_that_the_site_file_names(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[Finding]:
        return [finding for finding in common_key(load_site_file(file)) if finding.check == "encryption key"]

    file = kit / "local" / f"{NAME}.yaml"
    assert not found()
    file.write_text(f"{file.read_text()}keys: hospitals.key\n")
    assert "hospitals.key: No such file" in problems(kit)["encryption key"].text
    path, key = make_key(kit / "local")
    assert [(one.status, one.text) for one in found()] == [
        ("ok", f"{path}, fingerprint {key.fingerprint}, for its owner's eyes only")
    ]
    path.chmod(0o640)
    (open_to,) = found()
    assert open_to.status == "problem" and "others than its owner" in open_to.text
    assert open_to.mend.startswith(f"chmod 600 {path};")
    path.write_bytes(b"no key")
    path.chmod(0o600)
    (damaged,) = found()
    assert damaged.status == "problem" and "keys make" in damaged.mend
    path.unlink()
    make_key(kit / "local")
    monkeypatch.setitem(sys.modules, "tenseal", None)
    (without,) = found()
    assert without.status == "problem" and "medpfl[privacy]" in without.mend


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a kit to another user")
def test_a_kit_of_another_user(kit: Path) -> None:
    os.chown(kit / "startup" / "client.key", 12345, -1)
    assert "belongs to user 12345, you are 0" in problems(kit)["permissions"].text


def test_forbid_code_by_the_command(kit: Path) -> None:
    (kit / "local" / "authorization.json").unlink()
    done = CliRunner().invoke(app, ["site", "forbid-code", str(kit)], catch_exceptions=False)
    assert "jobs that bring code are refused here" in " ".join(done.stdout.split())
    assert next(f for f in examine(kit) if f.check == "code in jobs").status == "ok"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ((3, 10, 14), "problem"), ((3, 11, 7), "note"), ((3, 11, 8), "ok"), ((3, 12, 1), "note"), ((3, 12, 2), "ok"),
        ((3, 13, 0), "ok"), ((3, 14, 0), "problem"),
    ],
)  # fmt: skip
def test_pythons_whose_threads_can_fail_are_noted(version: tuple[int, int, int], status: str) -> None:
    found = python(version)
    assert found.status == status and ".".join(map(str, version)) in found.text
    assert ("threads that read arrays" in found.text) == (status == "note")


def test_a_folder_of_models_that_others_may_look_into(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier MedPFL made it on a volume; in a kit that is closed, nobody gets there."""
    own = tmp_path / "volume" / NAME
    own.mkdir(parents=True)
    monkeypatch.setenv(HOME_VARIABLE, str(own.parent))
    for path, mode, told in ((own, 0o755, True), (own, 0o700, False), (own, 0o750, True), (own.parent, 0o700, False)):
        path.chmod(mode)
        found = [one for one in examine(kit) if one.check == "home" and "may look into" in one.text]
        assert [(one.status, one.mend) for one in found] == [("note", f"chmod 700 {own}, unless they should")] * told
