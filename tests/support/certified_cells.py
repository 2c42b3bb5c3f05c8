# SPDX-License-Identifier: Apache-2.0
"""``python certified_cells.py KITS``: real cells of FLARE with the certificates of a server's and two hospitals' kits,
in a process of their own, for a process has one cell called "server". One hospital speaks as others; what the other one
and the server are told is printed as JSON."""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.message import Message
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

from medpfl.flare.commands import refuse_commands, refuse_others

Said = tuple[str, str, str]
"""In whose name, and the channel and topic."""
TELL = (CellChannel.SERVER_MAIN, "tell")
NETWORK = ("_net_manager", "change_root")
ABORT = (CellChannel.SERVER_COMMAND, "abort")  # comes in pieces
TASK = (CellChannel.SERVER_COMMAND, ServerCommandNames.GET_TASK)
GOES = (CellChannel.CELLNET, CellChannelTopic.Bye)
SERVER = "server.example.org"
TARGETS = ("server", "hospital-a")
CA = {DriverParams.CA_CERT: "rootCA.pem"}
OF_SERVER = {DriverParams.SERVER_CERT: "server.crt", DriverParams.SERVER_KEY: "server.key"}
OF_HOSPITAL = {DriverParams.CLIENT_CERT: "client.crt", DriverParams.CLIENT_KEY: "client.key"}


def cell_of(name: str, kit: Path, url: str, files: Mapping[DriverParams, str]) -> Cell:
    given = {key.value: str(kit / "startup" / file) for key, file in files.items()}
    cell = Cell(
        name,
        url,
        secure=True,
        credentials=given,
        create_internal_listener=False,
        auth_identity_map={"server": SERVER},
    )
    cell.start()
    return cell


def pry(kit: Path, url: str, names: Connection) -> None:
    """A hospital that says in each of these names which one it is, to the server and to the other hospital."""
    cell = cell_of(kit.name, kit, url, {**CA, **OF_HOSPITAL})
    cell.core_cell.add_outgoing_request_filter(
        "*", "*", lambda message: message.set_header(MessageHeaderKey.ORIGIN, message.get_header("as", kit.name))
    )
    while "server" not in cell.core_cell.agents:
        time.sleep(0.1)
    names.send("connected")
    while True:
        name, channel, topic = names.recv()
        for target in TARGETS:
            cell.fire_and_forget(channel, topic, target, Message({"as": name}))
        time.sleep(0.5)
        names.send("said")


def main(kits: Path) -> None:
    nvflare_fobs_initialize()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    names, there = Pipe()
    other = get_context("fork").Process(target=pry, args=(kits / "hospital-b", url, there), daemon=True)
    other.start()  # cells of one process have no connection between them
    server = cell_of("server", kits / SERVER, url, {**CA, **OF_SERVER})
    asked = cell_of("hospital-a", kits / "hospital-a", url, {**CA, **OF_HOSPITAL})
    came: dict[str, list[Said]] = {target: [] for target in TARGETS}
    for cell in (server, asked):
        to = came[cell.core_cell.get_fqcn()]

        def note(message: Message, to: list[Said] = to) -> None:
            way = (message.get_header(key) for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC))
            to.append((str(message.get_header("as")), *(str(one) for one in way)))  # type: ignore[arg-type]

        for channel, topic in (TELL, NETWORK, ABORT, TASK, GOES):
            cell.register_request_cb(channel, topic, note)
    assert names.poll(60), "no connection to the server"
    names.recv()

    def say(all_said: list[Said]) -> dict[str, list[Said]]:
        for said in all_said:
            names.send(said)
            names.recv()
        heard = {target: list(found) for target, found in came.items()}
        for found in came.values():
            found.clear()
        return heard

    names_of_others = ("server", "server.hospital-b", "server.job-1", "hospital-a", "hospital-a.hospital-b")
    others = [*((name, *TELL) for name in names_of_others), ("hospital-b", *NETWORK), ("hospital-b", *ABORT)]
    own, goes = [("hospital-b", *TELL), ("hospital-b.job-1", *TELL), ("hospital-b", *TASK)], [("hospital-b", *GOES)]
    found = {"others": others, "own": own, "goes": goes, "before": say([*others, *goes])}
    refuse_others(asked)
    found["to one that answers the server alone"] = say(goes)
    refuse_commands(server)
    found["after"] = say([*others, *own, *goes])
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    other.kill()
    os._exit(0)  # FLARE's threads would go on


if __name__ == "__main__":
    main(Path(sys.argv[1]))
