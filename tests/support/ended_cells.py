# SPDX-License-Identifier: Apache-2.0
"""``python ended_cells.py ATTACK guarded|as-flare-has-it``: real cells of FLARE of a job's process at the server and of
a hospital, which says what FLARE's server ends its process for. Prints what the process answers afterwards, if it is
still there."""

import os
import socket
import sys
import time
from typing import Any

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, Encoding, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.private.defs import new_cell_message
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

from medpfl.flare.outliving import outlive_streams

SERVER, HOSPITAL = "server.job-1", "hospital-a.job-1"
CHANNEL = CellChannel.SERVER_COMMAND


def undecodable(hospital: Cell) -> None:
    """An answer that is none of FLARE's encoding."""
    headers = {StreamHeaderKey.PAYLOAD_ENCODING: Encoding.FOBS}
    hospital.send_blob(CHANNEL, ServerCommandNames.SUBMIT_UPDATE, SERVER, Message(headers, b"no such encoding"))


def too_large(hospital: Cell) -> None:
    """The server's answer is said to be too large, as a hospital does whose settings say so."""
    back = hospital.byte_receiver.registry.find(CellChannel.RETURN_ONLY, "*").cb.__self__
    back.max_blob_size = 1
    ask(hospital, 3)
    back.max_blob_size = 2**30


def ask(hospital: Cell, timeout: float) -> Any:
    return hospital.send_request(
        channel=CHANNEL, topic="get_task", target=SERVER, request=new_cell_message({}, "?"), timeout=timeout
    ).payload


def main(attack: str, guarded: bool) -> None:
    nvflare_fobs_initialize()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    cells = {}
    for name in ("server", SERVER, HOSPITAL):
        cells[name] = Cell(name, url, secure=False, credentials={}, create_internal_listener=False)
        cells[name].start()

    def answer(_: Message) -> Message:
        return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, "a task")

    cells[SERVER].register_request_cb(channel=CHANNEL, topic="*", cb=answer)
    assert ask(cells[HOSPITAL], 20) == "a task"
    if guarded:
        outlive_streams()
    {"undecodable": undecodable, "too_large": too_large}[attack](cells[HOSPITAL])
    time.sleep(2)
    sys.stdout.write(f"\nit answers: {ask(cells[HOSPITAL], 20)}\n")
    sys.stdout.flush()
    os._exit(0)  # FLARE's threads would go on


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "guarded")
