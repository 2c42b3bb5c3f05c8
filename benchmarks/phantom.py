# SPDX-License-Identifier: Apache-2.0
"""``benchmarks phantom``: the shipped job softpull_phantom with several seeds, against its three references."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import OutOption, SeedsOption, machine, markdown, mean_sd, write_json
from medpfl.bundle import find_job
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.demo.phantom import write_phantoms
from medpfl.job import Job, load_job
from medpfl.results.files import read_summary
from medpfl.results.tables import result_table
from medpfl.rounds.simulate import simulate

JOB = "softpull_phantom"


def measure(seeds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the job in process with seeds 0, 1, ...; a seed changes the phantoms, the initial weights and the batches.

    Returns:
        Test Dice of each model at each hospital, seed by seed (the round chosen by validation).
    """
    if seeds < 1:
        raise MedPFLError(f"--seeds must be at least 1, got {seeds}")
    job = load_job(find_job(JOB))
    assert isinstance(job, Job)
    scores: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
            folder = Path(scratch)
            files = {site: folder / "sites" / f"{site}.yaml" for site in write_phantoms(folder / "sites", seed)}
            seeded = replace(job, settings=replace(job.settings, seed=seed))
            simulate(seeded, files, folder / "results", folder / "home")
            table = result_table(read_summary(folder / "results"))
        for column, label in enumerate(table.labels):
            found = scores.setdefault(label, {})
            for site, value in zip([*table.sites, "mean"], [*table.values[:, column], table.mean[column]], strict=True):
                found.setdefault(site, []).append(round(float(value), 6))
        progress(
            f"seed {seed}: mean " + ", ".join(f"{label} {found['mean'][-1]:.3f}" for label, found in scores.items())
        )
    return {"job": JOB, "seeds": list(range(seeds)), "score": table.score, "test": scores}


def table_of(results: dict[str, Any]) -> str:
    """Hospitals by models: mean and standard deviation over the seeds."""
    test = results["test"]
    sites = list(next(iter(test.values())))
    rows = [[site, *(mean_sd(found[site]) for found in test.values())] for site in sites]
    text = markdown(["hospital", *test], rows)
    if "Personal" in test and len(results["seeds"]) > 1:
        gains = []
        for label, found in test.items():
            if label != "Personal":
                gain = np.array(test["Personal"]["mean"]) - np.array(found["mean"])
                gains.append(f"{label} {mean_sd(gain.tolist())}")
        text += "\n\nPersonal minus, seed by seed (mean over the hospitals): " + "; ".join(gains) + "."
    return text


def command(seeds: SeedsOption = 3, out: OutOption = None) -> None:
    """softpull_phantom against local training, FedAvg and FedAvg + fine-tuning, over several seeds."""
    facts = machine()
    results = measure(seeds, say)
    write_json(out, "phantom", facts, results)
    say(table_of(results))
