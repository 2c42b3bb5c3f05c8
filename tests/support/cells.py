# SPDX-License-Identifier: Apache-2.0
"""Real cells of FLARE in one process, connected by TCP: a server's job and hospitals'."""

import socket

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

JOB = "job-1"


class Cells:
    """FLARE has one cell of a name in the life of a process, so these are made once (the fixture ``cells``)."""

    def __init__(self) -> None:
        nvflare_fobs_initialize()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._made: dict[str, Cell] = {}
        self.server = self._cell("server")

    def _cell(self, fqcn: str) -> Cell:
        if fqcn not in self._made:
            cell = Cell(fqcn, self.url, secure=False, credentials={}, create_internal_listener=False)
            cell.start()
            self._made[fqcn] = cell
        return self._made[fqcn]

    def of(self, name: str) -> Cell:
        """The cell of a hospital's process of the job."""
        return self._cell(f"{name}.{JOB}")

    def stop(self) -> None:
        for cell in self._made.values():
            cell.stop()
