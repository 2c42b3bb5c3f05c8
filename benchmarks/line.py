# SPDX-License-Identifier: Apache-2.0
"""A hospital's line to the server, which can be cut: what it sends passes through a port of this machine."""

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

_PIECE = 2**18


class Line:
    """Forwards whatever connects to ``port`` of this machine to another port, while it is used as a context.

    Args:
        port: where the hospital connects to.
        to: where the server listens.
    """

    def __init__(self, port: int, to: int):
        self.port, self._to = port, to
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()  # not set: nothing passes
        self._up = threading.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def silent(self) -> None:
        """Nothing passes any more, and neither side is told: what is sent waits, as packets that are sent again."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def lost(self) -> None:
        """The connections break as well, as where a firewall is started anew; who connects waits."""
        self.silent()
        self._loop.call_soon_threadsafe(self._break)

    def mended(self) -> None:
        """It is whole again."""
        self._loop.call_soon_threadsafe(self._whole.set)

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        self._whole.set()
        server = await asyncio.start_server(self._pass, "127.0.0.1", self.port, limit=_PIECE)
        self._up.set()
        await self._end.wait()
        server.close()
        self._break()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    def _break(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either side ends it."""
        self._open.add(writer)
        await self._whole.wait()
        with contextlib.suppress(OSError):
            back, on = await asyncio.open_connection("127.0.0.1", self._to, limit=_PIECE)
            self._open.add(on)
            await asyncio.gather(self._one_way(reader, on), self._one_way(back, writer))
            self._open.discard(on)
        writer.close()
        self._open.discard(writer)

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                await self._whole.wait()
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()
