# SPDX-License-Identifier: Apache-2.0
"""Of ``benchmarks gpu``: rounds over FLARE whose hospitals share one GPU, a server and each hospital in processes of
their own."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rounds import OURS, timed
from medpfl.demo.patterns import write_patterns
from medpfl.flare.poc import Federation
from medpfl.job import Job, write_job
from medpfl.job.settings import Settings
from medpfl.methods.softpull import SoftPull
from medpfl.models.resnet import ResNet
from medpfl.tasks.classification import Classification

ROUNDS = 4


def flare_rounds(hospitals: int, steps: int, width: int) -> dict[str, Any]:
    """Seconds a round (median without the first), of the start, and the processes' memory.

    Args:
        hospitals: on this machine, each with generated images.
        steps: batches of 16 a round.
        width: of the ResNet18.
    """
    task = Classification("pattern", size=(64, 64), architecture=ResNet(width=width))
    method = dataclasses.replace(SoftPull(), epochs=1, steps=steps, batch_size=16)
    settings = Settings(rounds=ROUNDS, references=(), finetune=0)
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        names = write_patterns(Path(scratch, "sites"))[:hospitals]
        write_job(Job("gpu_rounds", hospitals, settings, {}, method, task), Path(scratch, "gpu_rounds"))
        with Federation(Path(scratch, "sites"), names) as federation:
            found = timed(federation, Path(scratch, "gpu_rounds"), OURS, ROUNDS)
    return {
        "hospitals": hospitals,
        "steps": steps,
        "width": width,
        "round_seconds": round(float(np.median(found["seconds"])), 3),
        "start_seconds": found["start_seconds"],
        "peak_mb": found["peak_mb"],
    }
