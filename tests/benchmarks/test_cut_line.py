# SPDX-License-Identifier: Apache-2.0
"""A line that can be cut, between real sockets."""

import socket
import threading
from collections.abc import Iterator

import pytest

from benchmarks.line import Line
from medpfl.flare.federation import usable_port

WAIT = 0.3
"""Seconds in which something passes a line that is whole."""


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    """The line, and the socket of a server behind it that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=[connection], daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection:
            while piece := connection.recv(1000):
                connection.sendall(piece)

    threading.Thread(target=serve, daemon=True).start()
    with server, Line(usable_port(None), server.getsockname()[1]) as line:
        yield line, server
        server.shutdown(socket.SHUT_RDWR)


def connected(line: Line) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", line.port))
    found.settimeout(10)
    return found


def nothing_comes(end: socket.socket) -> bool:
    end.settimeout(WAIT)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(10)
    return False


def test_what_is_sent_passes_both_ways(ends: tuple[Line, socket.socket]) -> None:
    with connected(ends[0]) as one, connected(ends[0]) as other:
        for end, said in ((one, b"one"), (other, b"other"), (one, b"again")):
            end.sendall(said)
            assert end.recv(100) == said


def test_what_is_sent_on_a_silent_line_comes_later(ends: tuple[Line, socket.socket]) -> None:
    line, _ = ends
    with connected(line) as end:
        end.sendall(b"before")
        assert end.recv(100) == b"before"
        line.silent()
        end.sendall(b"meanwhile")
        assert nothing_comes(end)
        line.mended()
        assert end.recv(100) == b"meanwhile"


def test_a_broken_line_ends_its_connections_and_new_ones_wait(ends: tuple[Line, socket.socket]) -> None:
    line, _ = ends
    with connected(line) as end:
        end.sendall(b"before")
        assert end.recv(100) == b"before"
        line.lost()
        assert end.recv(100) == b""
    with connected(line) as end:
        end.sendall(b"new")
        assert nothing_comes(end)
        line.mended()
        assert end.recv(100) == b"new"
