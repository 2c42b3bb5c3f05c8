# SPDX-License-Identifier: Apache-2.0
"""What the server's process of a job loads: it computes no network and reads no patient's data."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ["matplotlib", "monai", "sklearn", "scipy", "pandas", "torchvision", "opacus"]
BUILD = """
import sys
from pathlib import Path

import medpfl.flare.controller
import medpfl.flare.filters
from medpfl.job import load_config
from medpfl.rounds.server.coordinator import Coordinator

for folder in sorted(path.parent for path in Path("jobs").glob("*/meta.json")):
    job = load_config(folder / "app" / "config", folder.name, 4, lambda path: None)
    Coordinator(job, ["anna", "berta", "carl", "dora"], Path(sys.argv[1], "home"), Path(sys.argv[1], folder.name))
print(len(list(Path(sys.argv[1]).iterdir())))
print([name for name in sys.argv[2:] if name in sys.modules])
"""


@pytest.mark.slow
def test_building_every_shipped_jobs_components_loads_none_of_the_heavy_libraries(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, tmp_path, *HEAVY], capture_output=True, text=True, check=True, cwd=ROOT
    )
    built, loaded = done.stdout.splitlines()
    assert int(built) >= 20
    assert loaded == "[]"
