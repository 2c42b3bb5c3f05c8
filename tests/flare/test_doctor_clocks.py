# SPDX-License-Identifier: Apache-2.0
"""What the doctor says where a clock is a day off, or a certificate is of other days, at either side of the wire."""

import contextlib
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest
import yaml

from medpfl.flare.federation import usable_port
from medpfl.flare.identity import check_server
from medpfl.flare.kits import read_kit
from medpfl.flare.provision import Provisioned, provision
from reissued import reissue

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    """Kits with nothing wrong but that nobody listens at the server's port."""
    folder = tmp_path_factory.mktemp("clocks")
    project = yaml.safe_load((ROOT / "poc" / "project.yml").read_text())
    port = usable_port(None)
    project["participants"][0].update(fed_learn_port=port, admin_port=port)
    (folder / "project.yml").write_text(yaml.safe_dump(project))
    return provision(folder / "project.yml", folder / "kits")


@pytest.fixture
def kit(made: Provisioned, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(made.folder / "hospital-a", tmp_path / "kit")
    return tmp_path / "kit"


def serve_once(kit: Path, port: int, ready: threading.Event) -> None:
    """A server's side of one TLS handshake, as FLARE demands it: both certificates of this federation."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit / "startup" / "server.crt", kit / "startup" / "server.key")
    context.load_verify_locations(kit / "startup" / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", port)) as listening:
        ready.set()
        connection, _ = listening.accept()
        with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1)


@pytest.mark.parametrize(
    ("whose", "begins", "ends", "words"),
    [
        ("server", 1, 20, "is not valid yet"), ("server", -20, -1, "has expired"), ("client", -20, -1, "here it is 2"),
        ("client", 1, 20, "by whose clock it is not valid yet"),
    ],
)  # fmt: skip
def test_a_clock_that_is_a_day_off_is_called_that(
    kit: Path, made: Provisioned, tmp_path: Path, whose: str, begins: int, ends: int, words: str
) -> None:
    server = tmp_path / "server"
    shutil.copytree(made.folder / "server.example.org", server)
    reissue(server if whose == "server" else kit, made, begins, ends, f"{whose}.crt")
    ready = threading.Event()
    serving = threading.Thread(target=serve_once, args=(server, read_kit(kit).port, ready), daemon=True)
    serving.start()
    assert ready.wait(10)
    found = {finding.check: finding for finding in check_server(read_kit(kit)) if finding.status == "problem"}
    serving.join(10)
    assert words in found["server"].text and "clock" in found["server"].text
    assert "proxy" not in found["server"].mend and found["server"].mend.startswith("compare this machine's clock")


@pytest.mark.parametrize(("begins", "ends", "words"), [(1, 20, "is not valid yet"), (-20, -1, "has expired")])
def test_a_server_that_runs_with_a_certificate_of_another_time_is_no_other_program(
    made: Provisioned, tmp_path: Path, begins: int, ends: int, words: str
) -> None:
    server = tmp_path / "server"
    shutil.copytree(made.folder / "server.example.org", server)
    reissue(server, made, begins, ends, "server.crt")
    kit, ready = read_kit(server), threading.Event()
    threading.Thread(target=serve_once, args=(server, kit.port, ready), daemon=True).start()
    assert ready.wait(10)
    (found,) = (finding for finding in check_server(kit) if finding.status == "problem")
    assert f"it runs at port {kit.port}, and every hospital refuses it: by this machine's clock" in found.text
    assert words in found.text and "stop what uses" not in found.mend and "clock" in found.mend
