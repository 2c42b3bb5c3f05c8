# SPDX-License-Identifier: Apache-2.0
"""Of ``benchmarks gpu``: a round of each method, as a multiple of Local's."""

import dataclasses
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_timing import attempted, now
from medpfl.core.devices import training_device
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import AttentiveMessages, Mixer
from medpfl.core.mixers import SoftPull as Pull
from medpfl.demo.patterns import write_patterns
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.apfl import APFL
from medpfl.methods.auto import Auto
from medpfl.methods.contract import Method
from medpfl.methods.cusfl import CusFL
from medpfl.methods.ditto import Ditto
from medpfl.methods.fedamp import FedAMP
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedbn import FedBN
from medpfl.methods.fedper import FedPer
from medpfl.methods.fedprox import FedProx
from medpfl.methods.fedrep import FedRep
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.fedsm import FedSM
from medpfl.methods.ifca import IFCA
from medpfl.methods.l2gd import L2GD
from medpfl.methods.lg_fedavg import LGFedAvg
from medpfl.methods.local import Local
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.moe import MoE
from medpfl.methods.moon import Moon
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.pfedme import PFedMe
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.scaffold import Scaffold
from medpfl.methods.softpull import SoftPull
from medpfl.models.resnet import ResNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.classification import Classification

METHODS: dict[str, Method] = {
    "Local": Local(),
    "FedAvg": FedAvg(),
    "FedProx": FedProx(mu=0.1),
    "Scaffold": Scaffold(),
    "FedBN": FedBN(),
    "FedPer": FedPer(),
    "FedRep": FedRep(),
    "LG-FedAvg": LGFedAvg(),
    "SoftPull": SoftPull(),
    "Ditto": Ditto(),
    "APFL": APFL(),
    "pFedMe": PFedMe(),
    "Per-FedAvg": PerFedAvg(),
    "L2GD": L2GD(),
    "MOON": Moon(),
    "FedRoD": FedRoD(),
    "FedAMP": FedAMP(),
    "IFCA": IFCA(),
    "MoE": MoE(),
    "FedAP": FedAP(),
    "FedSM": FedSM(),
    "pFedNet": PFedNet(),
    "CusFL": CusFL(),
    "MH-pFLID": MHpFLID(),
    "Auto": Auto(),
}
"""All but those that need public data."""
COMPONENTS: dict[str, dict[str, Mixer]] = {
    "FedAMP": {"anchor": AttentiveMessages(alpha=0.1, sigma=1.0)},
    "L2GD": {"mixed": Pull(lam=0.5)},
}
"""What has no default."""
LIMIT = 150.0
"""Seconds after which no further method begins."""


def method_rounds(repeats: int, hospitals: int, steps: int) -> dict[str, float | str]:
    """A round of so many hospitals with generated images in one process, as a multiple of Local's; or why it failed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="medpfl-") as scratch:
        names = write_patterns(Path(scratch, "sites"))[:hospitals]
        sites = {name: Path(scratch, "sites", f"{name}.yaml") for name in names}
        found = {
            name: attempted(partial(_round, name, method, sites, Path(scratch), repeats, steps, begun))
            for name, method in METHODS.items()
        }
    seconds = {name: each["seconds"] for name, each in found.items() if "seconds" in each}
    if "Local" not in seconds:
        raise MedPFLError(f"the rounds of Local failed: {found['Local']['failed']}")
    return {
        name: round(seconds[name] / seconds["Local"], 2) if name in seconds else each["failed"]
        for name, each in found.items()
    }


def _round(
    name: str, method: Method, sites: dict[str, Path], scratch: Path, repeats: int, steps: int, begun: float
) -> dict[str, Any]:
    if time.monotonic() - begun > LIMIT:
        raise MedPFLError(f"left out, because the methods before it took {LIMIT:.0f} s")
    task = Classification("pattern", size=(64, 64), architecture=ResNet(width=8, depth=10))
    trained = dataclasses.replace(method, epochs=1, steps=steps, batch_size=16)
    settings = Settings(rounds=repeats + 1, references=(), finetune=0)
    ends: list[float] = []
    job = Job("gpu", len(sites), settings, COMPONENTS.get(name, {}), trained, task)
    simulate(
        job, sites, scratch / "results" / name, scratch / "home" / name,
        progress=lambda coordinator: ends.append(now(training_device())), test=False,
    )  # fmt: skip
    return {"seconds": float(np.median(np.diff(ends)))}
