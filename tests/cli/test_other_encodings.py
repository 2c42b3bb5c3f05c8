# SPDX-License-Identifier: Apache-2.0
"""A terminal, or a file that is written to, in another encoding than UTF-8."""

import io
import signal
import sys

import pytest

from medpfl import cli
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "Gr??e ? 3"), ("latin-1", "Gr\xf6\xdfe ? 3")])
def test_a_letter_that_it_lacks_is_a_question_mark(encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ended with a traceback, after a data check of hours perhaps, for the three points of a heading."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def app() -> None:
        say("Gr\xf6\xdfe \u2026 3")
        raise MedPFLError("Gr\xf6\xdfe \u2026 3")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit):
        cli.main()
    for stream, before in zip(streams, ("", "medpfl: "), strict=True):
        stream.flush()
        assert stream.buffer.getvalue().decode(encoding) == f"{before}{shown}\n"  # type: ignore[attr-defined]
