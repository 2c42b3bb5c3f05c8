# SPDX-License-Identifier: Apache-2.0
"""Kits from FLARE's own provisioning: root certificate kept, private for their owner, storage off /tmp."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from medpfl.cli import main
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.data.site_file import load_site_file
from medpfl.flare.allow import CODE_RIGHT, READ_RIGHT, allow, forbid_code, roles_with
from medpfl.flare.doctor import examine
from medpfl.flare.hospitals import check_named, localised, settle
from medpfl.flare.kits import read_kit
from medpfl.flare.provision import MUTUAL_TLS, Provisioned, provision, read_project
from reissued import reissue
from small_jobs import write_table_sites

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "poc" / "project.yml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provision(PROJECT, tmp_path_factory.mktemp("kits"))


@pytest.mark.slow
def test_every_participant_has_a_kit_with_mutual_tls(made: Provisioned) -> None:
    entries = yaml.safe_load(PROJECT.read_text())["participants"]
    assert [person.kit.name for person in made.people] == [entry["name"] for entry in entries]
    assert {person.role for person in made.people} == {"server", "hospital", "project_admin", "lead"}
    assert {person.kit.security for person in made.people} == {MUTUAL_TLS}
    assert {person.kit.port for person in made.people} == {8002}
    assert made.first and (made.root.not_valid_after_utc - made.root.not_valid_before_utc).days == 1825


@pytest.mark.slow
def test_a_second_time_keeps_root_and_keys_and_makes_the_next_folder(made: Provisioned) -> None:
    again = provision(PROJECT, made.folder.parents[1])
    assert not again.first and again.fingerprint == made.fingerprint
    assert (made.folder.name, again.folder.name) == ("prod_00", "prod_01")
    for before, after in zip(made.people, again.people, strict=True):
        assert before.kit.key.read_bytes() == after.kit.key.read_bytes()
        assert before.kit.folder != after.kit.folder


@pytest.mark.slow
def test_nothing_is_readable_by_others(made: Provisioned) -> None:
    """FLARE leaves the root certificate's private key, in state/cert.json, readable by everybody."""
    place = made.folder.parent
    for path in (place, *place.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert "root_pri_key" in (made.state / "cert.json").read_text()


@pytest.mark.slow
def test_a_kit_in_a_folder_where_flare_starts_nothing(made: Provisioned, tmp_path: Path) -> None:
    """start.sh and the commands of job processes name the kit's folder without quotes."""
    name = "hospital-a"
    for folder, found in ((tmp_path / "kränze", []), (tmp_path / "my kit", ["place"])):
        shutil.copytree(made.folder / name, folder / name)
        said = [finding for finding in examine(folder / name) if finding.check == "place"]
        assert [
            finding.check for finding in said if finding.status == "problem" and "move the kit" in finding.mend
        ] == found


@pytest.mark.slow
def test_the_server_keeps_its_jobs_in_its_kit(made: Provisioned, tmp_path: Path) -> None:
    server = next(person.kit for person in made.people if person.role == "server")
    assert "/tmp/nvflare" in (server.local / "resources.json.default").read_text()
    text = (server.local / "resources.json").read_text()
    assert "/tmp/nvflare" not in text and str(server.folder / "storage" / "jobs") in text
    moved = server.folder.rename(tmp_path / "server")
    allow(moved)  # at its final place
    text = (moved / "local" / "resources.json").read_text()
    assert str(moved / "storage" / "snapshots") in text and str(server.folder) not in text
    own = json.loads(text)
    own["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = "/srv/flare"
    (moved / "local" / "resources.json").write_text(json.dumps(own))
    allow(moved)
    assert '"/srv/flare"' in (moved / "local" / "resources.json").read_text()  # a person's choice is kept
    moved.rename(server.folder)


@pytest.mark.slow
def test_code_is_refused_and_other_rights_stay(made: Provisioned) -> None:
    kit = next(person.kit for person in made.people if person.role == "hospital")
    assert roles_with(kit.folder, CODE_RIGHT) == ["lead", "project_admin"]
    before = json.loads((kit.local / "authorization.json.default").read_text())["permissions"]
    for _ in range(2):  # safe to repeat
        forbid_code(kit.folder)
    assert roles_with(kit.folder, CODE_RIGHT) == []
    after = json.loads((kit.local / "authorization.json").read_text())["permissions"]
    assert before["project_admin"] == "any" and after["project_admin"]["submit_job"] == "any"
    assert after["lead"] == {**before["lead"], "byoc": "none"}
    assert after["member"] == before["member"] and after["org_admin"] == before["org_admin"]
    (kit.local / "authorization.json").unlink()


@pytest.mark.slow
def test_a_hospitals_logs_and_files_stay(made: Provisioned) -> None:
    kit = next(person.kit for person in made.people if person.role == "hospital")
    assert '"allow_log_streaming": true' in (kit.local / "resources.json.default").read_text()
    assert roles_with(kit.folder, READ_RIGHT) == ["lead", "org_admin", "project_admin"]
    allow(kit.folder)
    assert json.loads((kit.local / "resources.json").read_text())["allow_log_streaming"] is False
    assert roles_with(kit.folder, READ_RIGHT) == []
    assert roles_with(kit.folder, "operate") == ["lead", "org_admin", "project_admin"]
    (kit.local / "authorization.json").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.pop("participants"), "expected a mapping with a list 'participants'"),
        (lambda p: p["participants"].pop(0), "expected one participant of type 'server', got 0"),
        (lambda p: p["participants"].append(dict(p["participants"][0])), "of type 'server', got 2"),
        (lambda p: p["participants"][1].pop("org"), "participant hospital-a: 'org' is missing"),
        (lambda p: p.pop("name"), "'name' is missing or no text"),
        (lambda p: p["participants"][1].update(connection_security="clear"), "must be 'mtls', got 'clear'"),
        (lambda p: p["participants"][1].update(name="no_under scores!"), "FLARE could not provision"),
    ],
)
@pytest.mark.slow
def test_a_wrong_project_is_told_in_one_sentence(tmp_path: Path, change: object, words: str) -> None:
    project = yaml.safe_load(PROJECT.read_text())
    change(project)  # type: ignore[operator]
    file = tmp_path / "project.yml"
    file.write_text(yaml.safe_dump(project))
    with pytest.raises(MedPFLError, match=words):
        provision(file, tmp_path / "kits")
    assert not list((tmp_path / "kits").rglob("prod_*/*/startup/*.key"))


@pytest.mark.parametrize("name", ["server", "mean"])
def test_a_hospital_whose_name_every_job_would_refuse_gets_no_kit(tmp_path: Path, name: str) -> None:
    content = yaml.safe_load(PROJECT.read_text())
    next(one for one in content["participants"] if one["type"] == "client")["name"] = name
    (tmp_path / "project.yml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=f"a hospital cannot be called '{name}'.*give it another name"):
        read_project(tmp_path / "project.yml")


def test_kits_that_cannot_be_written_are_told_before_flare_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "kits"):
        with pytest.raises(MedPFLError, match="cannot write startup kits into") as error:
            provision(PROJECT, place)
        assert "FLARE" not in str(error.value)


RELAY = {"name": "relay-1", "type": "relay", "org": "consortium"}
LISTENS = {"default_host": "relay.example.org", "port": 8003, "connection_security": "mtls"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"connect_to": {"name": "server.example.org", "connection_security": "clear"}}, "must be 'mtls', got 'clear'"),
        ({"listening_host": {"port": 8004}}, "hospital-a: listening_host.connection_security must be 'mtls', got noth"),
        ({"listening_host": "a.example.org"}, "listening_host.connection_security must be 'mtls', got nothing"),
        (
            {"server": {"listening_host": "s.example.org"}},
            "listening_host.connection_security must be",
        ),
        ({"connect_to": 5}, "participant hospital-a: 'connect_to' is neither a host's name nor a mapping"),
        ({"connect_to": {"name": "rely-1"}}, "there is no server or relay 'rely-1'; did you mean 'relay-1'?"),
        ({"connect_to": "relay-1"}, "to be behind the relay write {name: relay-1}, got 'relay-1'"),
        ({"relay": {}}, "relay-1: a relay needs a listening_host with default_host, port and connection_security"),
        ({"relay": {"listening_host": {**LISTENS, "port": None}}}, "a relay needs a listening_host"),
        (
            {"relay": {"listening_host": {"default_host": "relay.example.org", "port": 8003}}},
            "relay-1: listening_host.connection_security must be 'mtls', got nothing",
        ),
    ],
)
def test_a_way_without_mutual_tls_or_to_nobody_is_refused(
    tmp_path: Path, change: dict[str, dict[str, object]], words: str
) -> None:
    """FLARE lets a relay listen in the clear where the project file says nothing."""
    project = yaml.safe_load(PROJECT.read_text())
    project["participants"].append({**RELAY, **change.get("relay", {"listening_host": LISTENS})})
    project["participants"][0].update(change.get("server", {}))
    project["participants"][1].update({} if {"relay", "server"} & set(change) else change)
    (tmp_path / "project.yml").write_text(yaml.safe_dump(project))
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_project(tmp_path / "project.yml")


@pytest.mark.slow
def test_kits_of_a_federation_with_a_relay(tmp_path: Path) -> None:
    project = yaml.safe_load(PROJECT.read_text())
    project["participants"].append({**RELAY, "listening_host": LISTENS})
    project["participants"][1]["connect_to"] = {"name": "relay-1"}
    (tmp_path / "project.yml").write_text(yaml.safe_dump(project))
    made = provision(tmp_path / "project.yml", tmp_path / "kits")
    kits = {person.kit.name: person.kit for person in made.people}
    assert {person.kit.security for person in made.people} == {MUTUAL_TLS}
    relay, behind, direct = kits["relay-1"], kits["hospital-a"], kits["hospital-b"]
    assert (relay.role, relay.host, relay.port, relay.listens) == ("relay", "localhost", 8002, 8003)
    assert (behind.role, behind.host, behind.port, behind.relay) == ("hospital", "relay.example.org", 8003, "relay-1")
    assert (direct.port, direct.relay, direct.listens) == (8002, None, None)
    told = (kits["server.example.org"].local / "medpfl_hospitals.json").read_text()
    assert "hospital-a" in told and "relay" not in told
    with pytest.raises(MedPFLError, match="is not a server's or hospital's startup kit"):
        allow(relay.folder)  # no job runs there
    local = localised(read_project(tmp_path / "project.yml"), ["hospital-a"], 4711).written()["participants"]
    listens = next(entry["listening_host"] for entry in local if entry["type"] == "relay")  # type: ignore[index]
    assert listens["default_host"] == "localhost" and listens["port"] != 8003
    assert listens["connection_security"] == MUTUAL_TLS


def test_a_project_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the project file"):
        read_project(tmp_path / "nothing.yml")
    (tmp_path / "bad.yml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_project(tmp_path / "bad.yml")


def test_a_project_of_other_hospitals_is_not_tried_with_these() -> None:
    """They would be connected to the server in a way that the project does not say."""
    check_named(PROJECT, ["hospital-d", "hospital-a"])
    with pytest.raises(ConfigError, match=re.escape("has no hospital 'hospital-e'")) as told:
        check_named(PROJECT, ["hospital-a", "hospital-e"])
    assert "did you mean 'hospital-" in str(told.value) and "it has: hospital-a, hospital-b" in str(told.value)


def test_on_one_machine(tmp_path: Path) -> None:
    project = read_project(PROJECT)
    local = localised(project, ["hospital-b", "clinic-x"], 4711).written()["participants"]
    server = next(entry for entry in local if entry["type"] == "server")
    assert (server["fed_learn_port"], server["admin_port"], server["default_host"]) == (4711, 4711, "localhost")
    clients = {entry["name"]: entry["org"] for entry in local if entry["type"] == "client"}
    assert clients == {"hospital-b": "hospital_b", "clinic-x": "clinic_x"}
    assert project == read_project(PROJECT)


def test_a_hospital_gets_its_own_part_of_the_data_only(tmp_path: Path) -> None:
    for site in ("a", "b"):
        (tmp_path / "all" / site).mkdir(parents=True)
        (tmp_path / "all" / site / "datalist.json").write_text(site)
        (tmp_path / "all" / site / "image.nii").write_text(site)
        (tmp_path / "all" / f"{site}.csv").write_text(site)
        datasets = {"x": {"datalist": f"{site}/datalist.json", "kind": "volumes"}, "y": {"files": [f"{site}.csv"]}}
        (tmp_path / "all" / f"{site}.yaml").write_text(yaml.safe_dump({"site": site, "datasets": datasets}))
    (tmp_path / "local").mkdir()
    file = settle(tmp_path / "all", "a", tmp_path / "data", tmp_path / "local")
    found = yaml.safe_load(file.read_text())["datasets"]
    assert found["x"] == {"datalist": str(tmp_path / "data" / "a" / "datalist.json"), "kind": "volumes"}
    assert Path(found["y"]["files"][0]).read_text() == "a"
    names = {str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*")}
    assert names == {"a", "a/datalist.json", "a/image.nii", "a.csv"}


def test_patterns_and_nested_paths_move_with_their_folder(tmp_path: Path) -> None:
    images = {"files": ["pictures/{dx}/*.png"], "masks": {"files": "masks/*.png"}, "table": {"file": "t.csv"}}
    for name in ("pictures/nv/1.png", "masks/1.png", "t.csv"):
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / name).write_text(name)
    (tmp_path / "all" / "a.yaml").write_text(yaml.safe_dump({"datasets": {"x": {"kind": "images", **images}}}))
    (tmp_path / "local").mkdir()
    for data, root in ((tmp_path / "data", tmp_path / "data"), (None, tmp_path / "all")):
        found = yaml.safe_load(settle(tmp_path / "all", "a", data, tmp_path / "local").read_text())["datasets"]["x"]
        assert found["files"] == [f"{root}/pictures/{{dx}}/*.png"] and found["masks"]["files"] == f"{root}/masks/*.png"
        assert found["table"]["file"] == f"{root}/t.csv" and (root / "pictures" / "nv" / "1.png").is_file()


@pytest.mark.parametrize("copied", [True, False])
def test_a_site_file_s_key_is_found_from_the_kit(tmp_path: Path, copied: bool) -> None:
    """It is named relative to the site file, which lies in another folder now."""
    (tmp_path / "all").mkdir()
    site = write_table_sites(tmp_path / "all", ["a"])["a"]
    site.write_text(site.read_text() + "keys: hospitals.key\n")
    (tmp_path / "all" / "hospitals.key").write_text("secret")
    (tmp_path / "local").mkdir()
    file = settle(tmp_path / "all", "a", tmp_path / "data" if copied else None, tmp_path / "local")
    assert load_site_file(file).key_file().read_text() == "secret"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another account for a while")
def test_another_account_s_kit(tmp_path: Path) -> None:
    """Kits are their owner's alone (mode 700): whoever else tries a command there is told so."""
    kit = tmp_path / "kit"
    for name in ("startup", "local"):
        (kit / name).mkdir(parents=True)
    kit.chmod(0o700)
    os.seteuid(12345)
    try:
        for act in (read_kit, allow, forbid_code):
            with pytest.raises(
                MedPFLError, match=r"this account may not read .*: use the account that the kit belongs"
            ):
                act(kit)
    finally:
        os.seteuid(0)


def test_what_is_no_kit(tmp_path: Path) -> None:
    with pytest.raises(MedPFLError, match="is not a startup kit"):
        read_kit(tmp_path)
    (tmp_path / "startup").mkdir()
    for text, words in (("{", "is not valid JSON"), ("[]", "expected a JSON object"), ("{}", "is not what FLARE 2.9")):
        (tmp_path / "startup" / "fed_client.json").write_text(text)
        with pytest.raises(MedPFLError, match=words):
            read_kit(tmp_path)


@pytest.mark.slow
def test_the_command_says_who_gets_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def made(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["medpfl", "provision", "-o", str(tmp_path / "our kits"), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(str(ended.value.code)), *capfd.readouterr())

    said = [made()[1], made()[1]]
    assert "Root certificate (new)" in said[0] and "prod_00" in said[0]
    assert "the same as before: kits handed out earlier stay valid" in said[1] and "prod_01" in said[1]
    # By it the events of a job tell which hospitals are missing: of one that was added, or has left, too.
    listed = f"cp '{tmp_path}/our kits/medpfl/prod_01/server.example.org/local/medpfl_hospitals.json' KIT/local/"
    assert listed in said[1] and "medpfl_hospitals.json" not in said[0]
    for words in ("hospital-d", "lead@hospital-a.example.org", "gpg --symmetric", "preflight check", ": passed"):
        assert words in said[0], words
    allowed, guarded = ("medpfl site allow KIT; medpfl site ", "medpfl site allow KIT; medpfl site forbid-code KIT; ")
    started = "doctor KIT; KIT/startup/start.sh >> KIT/start.log 2>&1"
    assert f"\n  server: {allowed}{started}\n" in said[0]
    assert (
        f"\n  hospital: site file, and a datalist beside it, into KIT/local/; {guarded}medpfl site {started}\n"
        in said[0]
    )
    assert f"tar -cz -C '{tmp_path}/our kits/medpfl/prod_00' KIT" in said[0]  # as it can be pasted into a shell
    code, _, error = made("--project", str(tmp_path / "no"))
    assert code == 1 and error.startswith("medpfl: cannot read the project file")


@pytest.mark.slow
def test_certificates_that_come_again_and_end_soon_are_told(
    made: Provisioned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """FLARE returns what it made before, however old: the new kits would not start."""
    kits = shutil.copytree(made.folder.parents[1], tmp_path / "kits")
    state = kits / "medpfl" / "state" / "cert.json"
    stored = json.loads(state.read_text())
    for name, ends in (("hospital-a", -3), ("hospital-b", 20), ("hospital-c", 40)):
        kit = kits / "medpfl" / made.folder.name / name
        reissue(kit, made, -300, ends)
        stored[name]["cert"] = (kit / "startup" / "client.crt").read_text()
    state.write_text(json.dumps(stored))
    monkeypatch.setattr("sys.argv", ["medpfl", "provision", "-o", str(kits)])
    with pytest.raises(SystemExit):
        main()
    told, dates = capfd.readouterr(), r" \(20\d\d-\d\d-\d\d\)"
    expected = f"Certificates that have ended, .*: hospital-a{dates}, hospital-b{dates}\\. Provisioning again"
    assert re.search(expected, told.out), told
