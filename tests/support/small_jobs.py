# SPDX-License-Identifier: Apache-2.0
"""Small real hospitals for the tests: CSV tables with site files, and jobs that train on them in milliseconds."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml

from medpfl.core.mixers import Identity, Mean, Mixer, SoftPull
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.methods.contract import Method
from medpfl.methods.references import REFERENCES
from medpfl.tasks.contract import Task
from medpfl.tasks.tabular import Tabular

SITES = ["anna", "berta", "clara", "dora"]


def write_table_sites(folder: Path, sites: list[str] = SITES, rows: int = 40) -> dict[str, Path]:
    """Hospitals whose rows follow one rule, each with a shift of its own; returns their site files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, site in enumerate(sites):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(rows - 4 * number, 3)) + 0.3 * number
        y = (x @ [1.0, -1.0, 0.5] + 0.3 * rng.normal(size=len(x)) > 0.15 * number).astype(int)
        lines = [
            "a,b,c,sick",
            *(",".join(f"{v:.6f}" for v in row) + f",{label}" for row, label in zip(x, y, strict=True)),
        ]
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")
        dataset = {
            "kind": "table",
            "files": [f"{site}.csv"],
            "features": {"a": "number", "b": "number", "c": "number"},
            "label": {"column": "sick", "classes": {"no": [0], "yes": [1]}},
        }
        files[site] = folder / f"{site}.yaml"
        files[site].write_text(yaml.safe_dump({"site": site, "datasets": {"blood": dataset}}))
    return files


FEW = {"least_samples": 5, "least_update": 4}
"""A policy for hospitals as small as tests want them; the defaults ask for 8 of both."""


def for_few(file: Path) -> Path:
    """Let few samples train at this hospital; returns its site file."""
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "policy": FEW}))
    return file


def on_its_own(file: Path) -> Path:
    """The site file with a policy that lets its hospital train alone, which none does by default."""
    alone = file.with_name(f"{file.stem}.alone.yaml")
    alone.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "policy": {"least_hospitals": 1}}))
    return alone


def declared(mixers: Mapping[str, Mixer], method: Method) -> tuple[tuple[str, ...], dict[str, Mixer]]:
    """The references and the components of a job that mixes exactly so."""
    references = tuple(name for name, kind in REFERENCES.items() if name in mixers and not isinstance(method, kind))
    return references, {slot: mixer for slot, mixer in mixers.items() if slot not in references or mixer.travels}


def small_job(
    rounds: int = 3,
    mixers: dict[str, Mixer] | None = None,
    method: Method | None = None,
    task: Task | None = None,
    min_clients: int = 2,
    **settings: float,
) -> Job:
    """A job on the small tables; every part can be replaced."""
    mixers = mixers or {"local": Identity(), "fedavg": Mean(), "model": SoftPull(lam=0.5)}
    method = method or softpull.SoftPull(lr=0.05, batch_size=8)
    references, components = declared(mixers, method)
    return Job(
        "small", min_clients, Settings(rounds=rounds, references=references, finetune=2, **settings),  # type: ignore[arg-type]
        components, method, task or Tabular(dataset="blood", hidden=(4,)),
    )  # fmt: skip
