# SPDX-License-Identifier: Apache-2.0
"""How a message's arrays travel: all their bytes one after another, in pieces that the receiver asks for.

FLARE sends an array as one piece, a zipped copy of it, of which the receiver makes the array again: two copies more at
the sender and one more at the receiver, each as large as the largest layer, for every hospital that is at it. Here a
piece is cut out of the arrays when it is asked for, and lands where it is to lie.
"""

import json
from collections.abc import Mapping
from io import BytesIO
from math import prod

import numpy as np
import psutil
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.streaming.download_service import Consumer, Downloadable, ProduceRC, download_object
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

from medpfl.core.errors import ProtocolError
from medpfl.flare.memory import CLEANER

KIND = 209
"""What FLARE calls a DOT, up to 255: says which class reads a reference. FLARE's own are below ten."""
PIECE = 4 * 2**20
"""Bytes of a piece at the most; ``np_download_chunk_size`` of FLARE's configuration is another."""
WAIT = 60.0
"""Seconds after which a piece is asked for again at the latest: FLARE waits 600 for one that was lost on the way, on a
line that broke and is there again."""
_UNDER_WAY = 16 * 2**20
"""Bytes of all pieces that are under way at a time, where there is little memory; each is in memory a few times."""
_MOST_ARRAYS = 1_000_000
_AT = "at"
_KINDS = "fiubc"
"""NumPy's letters of the types that travel."""


class Travelling(np.ndarray):
    """An array that travels in this way; it arrives as a plain one."""


class Pieces(Downloadable):
    """The sender's end: arrays as one row of bytes, behind a first piece that says what they are.

    Args:
        arrays: name to array; they must not change until they have been fetched.
        most: bytes of a piece.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], most: int):
        super().__init__(arrays)
        self._most = most
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
        self._parts: list[memoryview] = [one.data for one in flat]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        self._said = json.dumps([[name, array.dtype.str, array.shape] for name, array in arrays.items()]).encode()

    def produce(self, state: dict[str, object], requester: str) -> tuple[str, list[bytes] | None, dict[str, object]]:
        """The next piece: what FLARE calls when it is asked for one."""
        parts, ends = self._parts, self._ends
        whole = int(ends[-1]) if len(ends) else 0
        at = state.get(_AT) if state else 0
        if not isinstance(at, int) or not 0 <= at <= whole:
            return ProduceRC.ERROR, None, {}
        if state and at == whole:
            return ProduceRC.EOF, None, {}
        found, begun, stop = [] if state else [self._said], at, min(whole, at + self._most)
        index = int(np.searchsorted(ends, at, side="right"))
        while at < stop:
            begin = int(ends[index]) - len(parts[index])
            until = min(stop, int(ends[index]))
            found.append(bytes(parts[index][at - begin : until - begin]))
            at, index = until, index + 1
        CLEANER.passed(stop - begun)
        return ProduceRC.OK, found, {_AT: at}

    def release(self) -> None:
        """FLARE needs the arrays no more."""
        self.base_obj, self._parts, self._ends = None, [], np.zeros(0, np.int64)


class Arrays(Consumer):
    """The receiver's end; ``error`` says afterwards why there are no ``arrays``.

    Args:
        most: bytes that all arrays may take together.
    """

    supports_pipelining = True

    def __init__(self, most: int):
        super().__init__()
        self.error: str | None = None
        self.arrays: dict[str, np.ndarray] = {}
        self._most = most
        self._rows: list[memoryview] | None = None
        self._row = self._filled = 0

    def consume(self, ref_id: str, state: dict[str, object], data: list[bytes]) -> dict[str, object]:
        """A piece has come.

        Raises:
            ProtocolError: it is none, or more than was said.
        """
        if self._rows is None:
            self._rows = self._places(data.pop(0))
        for part in data:
            self._fill(self._rows, memoryview(part))
        CLEANER.passed(sum(map(len, data)))
        data.clear()  # FLARE's objects keep the list until garbage is collected
        return state

    def download_completed(self, ref_id: str) -> None:
        """All pieces have come.

        Raises:
            ProtocolError: they are not all that was said.
        """
        if self._rows is None or self._row < len(self._rows):
            self.error = "it ended early"
            raise ProtocolError(self.error)

    def download_failed(self, ref_id: str, reason: str) -> None:
        """It was broken off."""
        self.error, self.arrays = reason, {}

    def _places(self, said: bytes) -> list[memoryview]:
        """Memory for all arrays; of those that have bytes, to be filled in this order."""
        listed = json.loads(said)
        if not isinstance(listed, list) or len(listed) > _MOST_ARRAYS:
            raise ProtocolError("it does not say which arrays it has")
        size = 0
        kinds: list[tuple[str, np.dtype, tuple[int, ...]]] = []
        for name, kind, shape in listed:
            dtype = np.dtype(str(kind))
            if dtype.kind not in _KINDS or not all(isinstance(side, int) and side >= 0 for side in shape):
                raise ProtocolError("it says of an array what no array is")
            kinds.append((str(name), dtype, tuple(shape)))
            size += prod(shape) * dtype.itemsize
        if size > self._most:
            raise ProtocolError(f"it has {size // 2**20} MiB, and {self._most // 2**20} MiB may be taken for it")
        self.arrays = {name: np.empty(shape, dtype) for name, dtype, shape in kinds}
        if len(self.arrays) < len(kinds):
            raise ProtocolError("it has two arrays of one name")
        return [one.reshape(-1).view(np.uint8).data for one in self.arrays.values() if one.size]

    def _fill(self, rows: list[memoryview], part: memoryview) -> None:
        while part:
            if self._row == len(rows):
                raise ProtocolError("it has more bytes than it says")
            row = rows[self._row]
            taken = min(len(part), len(row) - self._filled)
            row[self._filled : self._filled + taken] = part[:taken]
            part, self._filled = part[taken:], self._filled + taken
            if self._filled == len(row):
                self._row, self._filled = self._row + 1, 0


def may_take(room: int = 0) -> int:
    """Bytes that one message may take here: ``room``, and at least half of what is free."""
    free: int = psutil.virtual_memory().available
    return max(room, free // 2)


class TravellingDecomposer(ViaDownloaderDecomposer):
    """Tells FLARE how ``Travelling`` travels."""

    def __init__(self) -> None:
        super().__init__(PIECE, "np_")

    def supported_type(self) -> type[Travelling]:
        return Travelling

    def get_download_dot(self) -> int:
        return KIND

    def to_downloadable(self, items: dict[str, np.ndarray], max_chunk_size: int, fobs_ctx: dict[str, object]) -> Pieces:
        return Pieces(items, max_chunk_size)

    def download(
        self,
        from_fqcn: str,
        ref_id: str,
        per_request_timeout: float,
        cell: Cell,
        secure: bool = False,
        optional: bool = False,
        abort_signal: Signal | None = None,
        progress_cb: object = None,
    ) -> tuple[str | None, dict[str, np.ndarray]]:
        consumer = Arrays(may_take())
        download_object(
            from_fqcn,
            ref_id,
            min(per_request_timeout, WAIT),
            cell,
            consumer,
            secure=secure,
            optional=optional,
            abort_signal=abort_signal,
            progress_cb=progress_cb,
        )
        return consumer.error, consumer.arrays

    def native_decompose(self, target: np.ndarray, manager: DatumManager | None = None) -> bytes:
        """Where there is no network."""
        stream = BytesIO()
        np.save(stream, target, allow_pickle=False)
        return stream.getvalue()

    def native_recompose(self, data: bytes, manager: DatumManager | None = None) -> np.ndarray:
        found: np.ndarray = np.load(BytesIO(data), allow_pickle=False)
        return found


def cut_for(receivers: int, room: int) -> None:
    """How large the pieces are that this process sends to so many at a time, where models may take ``room`` bytes."""
    _HOW.max_chunk_size = min(PIECE, max(_UNDER_WAY, room // 16) // max(1, receivers))


_HOW = TravellingDecomposer()
fobs.register(_HOW)
