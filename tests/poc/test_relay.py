# SPDX-License-Identifier: Apache-2.0
"""A federation in which hospitals reach the server over one of FLARE's relays: they have no other connection."""

import json
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from medpfl.flare.doctor import examine
from medpfl.flare.hospitals import HospitalFederation
from medpfl.flare.identity import handshake
from medpfl.flare.kits import RELAYED, read_kit
from small_jobs import small_job, write_table_sites
from tools import assert_same, outcome, run, write_job

pytestmark = [pytest.mark.poc, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
SITES = ["hospital-a", "hospital-b", "hospital-c"]
BEHIND = SITES[:2]
RELAY = "relay-1"


class Impatient(HospitalFederation):
    """Its hospitals repeat after 5 seconds what was lost on the way, and not after 300, or 60 for tensors
    (docs/network.md)."""

    def _environment(self, name: str) -> dict[str, str]:
        return {**super()._environment(name), "NVFLARE_NP_STREAMING_PER_REQUEST_TIMEOUT": "5"}

    def _provision(self) -> None:
        super()._provision()
        for site in self.sites:
            file = self.kit(site) / "startup" / "fed_client.json"
            content = json.loads(file.read_text())
            content["client"]["communication_timeout"] = 5.0
            file.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_table_sites(tmp_path_factory.mktemp("sites"), SITES)


@pytest.fixture(scope="module")
def federation(hospitals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HospitalFederation]:
    project = yaml.safe_load((ROOT / "poc" / "project.yml").read_text())
    way = {"default_host": "relay.example.org", "port": 8003, "connection_security": "mtls"}
    project["participants"].append({"name": RELAY, "type": "relay", "org": "consortium", "listening_host": way})
    for one in project["participants"]:
        if one["name"] in BEHIND:
            one["connect_to"] = {"name": RELAY}
    file = tmp_path_factory.mktemp("project") / "project.yml"
    file.write_text(yaml.safe_dump(project))
    folder = hospitals[SITES[0]].parent
    with Impatient(file, folder, SITES, workspace=tmp_path_factory.mktemp("federation")) as up:
        yield up
    assert not up._members()


def test_a_job_over_the_relay_gives_what_simulate_gives(
    federation: HospitalFederation, hospitals: dict[str, Path], tmp_path: Path
) -> None:
    job = replace(small_job(min_clients=3), name="relayed")
    job_id = federation.submit(write_job(job, tmp_path / "relayed"))
    assert federation.follow(job_id, job.name, 150) is None
    assert_same(outcome(federation.download(job_id)), run(job, hospitals, tmp_path / "simulated"))
    for site in SITES:  # of each hospital that is behind the relay one connection in all, of its main process
        said = federation._console(site).read_text()
        assert (f":{federation.relays[RELAY]} SSL {RELAY}] is created" in said) is (site in BEHIND)
        assert (f":{federation.port} SSL" in said) is (site not in BEHIND)


def is_relay(process: psutil.Process) -> bool:
    try:
        return "app.relay.relay" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it ended since it was listed
        return False


def test_a_relay_that_is_killed_is_back_and_the_job_ends_whole(
    federation: HospitalFederation, hospitals: dict[str, Path], tmp_path: Path
) -> None:
    job = replace(small_job(rounds=12, min_clients=3), name="killed")
    job_id = federation.submit(write_job(job, tmp_path / "killed"))
    progress = federation.run_folder("server", job_id) / "results" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (progress.exists() and '"split": "round", "round": 2' in progress.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (killed,) = [one for one in federation._members() if is_relay(one)]
    killed.kill()
    assert federation.follow(job_id, job.name, 150) is None
    assert_same(outcome(federation.download(job_id)), run(job, hospitals, tmp_path / "simulated"))


def test_the_relays_wire_is_mutual_tls_on_both_sides(federation: HospitalFederation) -> None:
    behind, relay = read_kit(federation.kit(BEHIND[0])), read_kit(federation.kit(RELAY))
    assert (behind.port, behind.relay, relay.port) == (federation.relays[RELAY], RELAY, federation.port)
    assert handshake(behind, "localhost").endswith(f"with '{RELAY}'")
    assert handshake(relay, "localhost").endswith("with 'server.example.org'")
    for kit in (behind, relay):
        with pytest.raises(ssl.SSLError, match="certificate required"):
            handshake(kit, "localhost", certificate=False)


@pytest.mark.parametrize("name", [RELAY, BEHIND[0], "server"])
def test_the_doctor_finds_nothing_at_a_running_kit(federation: HospitalFederation, name: str) -> None:
    told = list(examine(federation.kit(name)))
    findings = {finding.check: finding for finding in told}
    assert not [finding for finding in told if finding.status == "problem"]
    if name == RELAY:
        assert "site file" not in findings and "allow list" not in findings
        assert "it runs: TLS" in findings["relay"].text
        assert "both sides' certificates accepted" in findings["server"].text
    elif name != "server":
        kit, note = [finding for finding in told if finding.check == "kit"]
        assert f"behind relay '{RELAY}', localhost:{federation.relays[RELAY]}" in kit.text
        assert note.status == "note" and f"whoever runs the relay '{RELAY}' can read all" in note.text
        assert "both sides' certificates accepted" in findings["relay"].text


def test_the_doctor_tells_that_the_relay_is_not_there(federation: HospitalFederation, tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    shutil.copytree(federation.kit(BEHIND[0]), kit, ignore=shutil.ignore_patterns("*.fl"))  # it does not run
    file = kit / "local" / RELAYED
    with socket.socket() as probe:  # a port at which nobody listens
        probe.bind(("127.0.0.1", 0))
        file.write_text(file.read_text().replace(str(federation.relays[RELAY]), str(probe.getsockname()[1])))
        (found,) = [finding for finding in examine(kit) if finding.status == "problem"]
    assert found.check == "relay" and "nothing listens at localhost:" in found.text and "the relay runs" in found.mend
