# SPDX-License-Identifier: Apache-2.0
"""A kit whose own certificates or key cannot be used: nothing can be said of its server."""

from pathlib import Path

import pytest

from medpfl.flare.doctor import examine
from medpfl.flare.identity import check_server
from medpfl.flare.kits import read_kit
from medpfl.flare.provision import Provisioned, provision

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits"))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rootCA.pem", "client.key", "client.crt"])
def test_a_server_that_was_not_asked_does_not_refuse(made: Provisioned, file: str) -> None:
    """It was said that it "refuses this kit's certificate (key values mismatch)", where nothing listens."""
    folder = made.folder / "hospital-a"
    path = folder / "startup" / file
    content = path.read_bytes()
    try:
        for broken in (content[:200], (made.folder / "hospital-b" / "startup" / file).read_bytes()):
            if broken == content:  # all kits have one root
                continue
            path.write_bytes(broken)
            (found,) = check_server(read_kit(folder))
            assert found.status == "note" and "not tried: this kit's own certificates or key" in found.text
            assert any(one.check == "certificates" and one.status == "problem" for one in examine(folder))
    finally:
        path.write_bytes(content)
