# SPDX-License-Identifier: Apache-2.0
"""Hospitals whose tables have several labels, a number, or a time and an event to predict."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

SITES = ["anna", "berta", "clara"]
SEVERAL = {"columns": {"oedema": "oed", "effusion": "eff", "nodule": "nod"}, "unknown": [-1]}
SURVIVAL = {"time": "days", "event": "status", "yes": ["dead"], "no": ["alive"]}
ANSWERS: dict[str, Any] = {"several": SEVERAL, "value": "stay", "survival": SURVIVAL}


def table(rows: int, seed: int) -> str:
    """CSV: two features, three labels (some of them unknown), a number, and a time that is often censored."""
    rng = np.random.default_rng(seed)
    age, pain = rng.normal(60, 10, rows), rng.normal(size=rows)
    risk = (age - 60) / 10 + pain
    labels = (risk[:, None] + rng.normal(size=(rows, 3)) > [0.0, 0.5, 1.0]).astype(int).astype(str)
    labels[rng.random((rows, 3)) < 0.15] = ""
    labels[0, 0], labels[1, 1] = "-1", ""
    came, seen = rng.exponential(100 * np.exp(-risk)), rng.uniform(20, 400, rows)
    lines = ["age,pain,oed,eff,nod,stay,days,status"]
    for row in range(rows):
        status = "dead" if came[row] <= seen[row] else "alive"
        told = [f"{age[row]:.3f}", f"{pain[row]:.3f}", *labels[row], f"{5 + 2 * risk[row] + seed:.3f}"]
        lines.append(",".join([*told, f"{min(came[row], seen[row]) + 0.1:.2f}", status]))
    return "\n".join(lines) + "\n"


def declare(folder: Path, site: str, answer: str, rows: int = 60, **changes: Any) -> Path:
    """A hospital's site file and table; ``answer``: the key of ``ANSWERS`` that it declares."""
    folder.mkdir(exist_ok=True)
    (folder / f"{site}.csv").write_text(table(rows, SITES.index(site)))
    features = {"age": "number", "pain": "number"}
    dataset = {"kind": "table", "files": [f"{site}.csv"], "features": features, answer: ANSWERS[answer], **changes}
    (folder / f"{site}.yaml").write_text(yaml.safe_dump({"site": site, "datasets": {"ward": dataset}}, sort_keys=False))
    return folder / f"{site}.yaml"
