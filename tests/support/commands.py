# SPDX-License-Identifier: Apache-2.0
"""The command ``medpfl`` as its entry point runs it, in this process: a new one imports torch for a sentence."""

import sys

import pytest

from medpfl.cli import main


def refusal(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command writes to stderr when it fails: one line, without a traceback."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["medpfl", *map(str, arguments)])
        main()
    said = capfd.readouterr().err
    assert ended.value.code == 1 and said.startswith("medpfl: ") and len(said.strip().splitlines()) == 1, said
    return said
