# SPDX-License-Identifier: Apache-2.0
"""``benchmarks heart``: FLamby's Fed-Heart-Disease protocol, and SoftPull under the same training.

Ogier du Terrail et al., "FLamby", NeurIPS 2022. Logistic regression, batch size 4, learning rate 0.001, seeds 42 to 46:
Local and Pooled train 50 epochs with Adam; FedAvg trains 100 updates a round with SGD for 15 rounds, weighted by size.
Beyond FLamby: SoftPull (lam 0.5), and both with Adam. The model of the last round counts; there is no validation part.
"""

import csv
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
import yaml
from torch import nn

from benchmarks.common import OutOption, SeedsOption, machine, markdown, mean_sd, write_json
from benchmarks.heart_task import HeartTabular, PooledTabular
from medpfl import store
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mixer, SoftPull
from medpfl.data.samples import Samples
from medpfl.data.site_file import load_site_file, read_for_study
from medpfl.demo.heart import HOSPITALS, write_heart
from medpfl.deployed.evaluate import evaluate
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.methods.contract import Build, Method
from medpfl.methods.local import Local
from medpfl.results.files import read_summary
from medpfl.results.tables import result_table
from medpfl.rounds.simulate import simulate

FIRST_SEED = 42
EPOCHS = 50
ROUNDS = (486 // 4 // 4) * EPOCHS // 100  # FLamby's rule: 15
LAM = 0.5
OPTIMIZERS: dict[str, Literal["sgd", "adam"]] = {"SGD": "sgd", "Adam": "adam"}
SITES = list(HOSPITALS)
POOLED = "Pooled"
POOLED_OWN = "Pooled, tested with pooled statistics"
# Our row: how FLamby calls it in its results ("{centre}" is the number of the test centre).
PUBLISHED = {"Local": "Local {centre}", POOLED: "Pooled Training", "FedAvg (SGD)": "FedAvg100"}
Scores = dict[str, dict[str, float]]


def measure(data: Path | None, seeds: int, flamby: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the protocol with ``seeds`` seeds from 42, from FLamby's initial weights and from this package's own.

    Args:
        data: folder with the UCI files.
        flamby: folder with FLamby's ``heart_seed<N>.csv``, to compare with.

    Returns:
        Test accuracies: start to method to hospital to one value a seed; and FLamby's, method to hospital to values.
    """
    if seeds < 1:
        raise MedPFLError(f"--seeds must be at least 1, got {seeds}")
    numbers = list(range(FIRST_SEED, FIRST_SEED + seeds))
    published = read_published(flamby, numbers) if flamby else {}
    collected: dict[str, dict[str, dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        sites = Path(scratch) / "sites"
        write_heart(sites, data, "flamby")
        for seed in numbers:
            for start, initial in (("flamby", seed), ("own", None)):
                found = one_seed(seed, initial, sites, Path(scratch) / f"{start}-{seed}")
                for method, scores in found.items():
                    rows = collected.setdefault(start, {}).setdefault(method, {})
                    for site, value in scores.items():
                        rows.setdefault(site, []).append(round(value, 6))
            progress(f"seed {seed} done")
    return {"seeds": numbers, "rounds": ROUNDS, "lam": LAM, "accuracy": collected, "published": published}


def one_seed(seed: int, start: int | None, sites: Path, scratch: Path) -> Scores:
    """Test accuracies of one seed: method to hospital to value.

    Args:
        start: seed of FLamby's initial weights; None: this package's own.
        sites: folder with the hospitals' site files.
        scratch: for the runs, a folder that need not be there.
    """
    task = HeartTabular("heart", start=start)
    files = {site: sites / f"{site}.yaml" for site in SITES}
    alone = Local(epochs=EPOCHS, lr=1e-3, batch_size=4, optimizer="adam")

    def run(name: str, method: Method, rounds: int, references: tuple[str, ...] = (), **mixers: Mixer) -> Scores:
        settings = Settings(rounds=rounds, references=references, seed=seed, finetune=0)
        job = Job(name, len(files), settings, mixers, method, task)
        simulate(job, files, scratch / name / "results", scratch / name / "home")
        table = result_table(read_summary(scratch / name / "results"), "last")
        columns = zip(table.labels, table.values.T, strict=True)
        return {label: dict(zip(table.sites, map(float, values), strict=True)) for label, values in columns}

    scores = run("local", alone, 1)
    scores.update(_pooled(seed, task, alone, files, scratch))
    for title, optimizer in OPTIMIZERS.items():
        method = softpull.SoftPull(steps=100, lr=1e-3, batch_size=4, optimizer=optimizer)
        found = run(optimizer, method, ROUNDS, ("fedavg",), model=SoftPull(LAM))
        scores[f"FedAvg ({title})"] = found["FedAvg"]
        scores[f"SoftPull ({title})"] = found["Personal"]
    return scores


def _pooled(seed: int, task: HeartTabular, method: Local, files: dict[str, Path], scratch: Path) -> Scores:
    """Local training at one hospital that holds all four files; its model is tested on every centre's test part."""
    declared = yaml.safe_load(files[SITES[0]].read_text(encoding="utf-8"))
    heart = declared["datasets"]["heart"]
    heart["files"] = [
        yaml.safe_load(file.read_text(encoding="utf-8"))["datasets"]["heart"]["files"][0] for file in files.values()
    ]
    scratch.mkdir(parents=True, exist_ok=True)
    union = scratch / "pooled.yaml"
    # The order of the classes counts (it numbers them), so the keys stay in theirs.
    text = yaml.safe_dump({"site": "pooled", "datasets": {"heart": heart}}, sort_keys=False)
    union.write_text(text, encoding="utf-8")
    pooled_task = PooledTabular(task.dataset, start=task.start)
    settings = Settings(rounds=1, references=(), seed=seed, finetune=0)
    job = Job("pooled", 1, settings, {}, method, pooled_task)
    simulate(job, {"pooled": union}, scratch / "pooled" / "results", scratch / "pooled" / "home", read=read_for_study)

    data = pooled_task.load(load_site_file(union))
    models = nn.ModuleDict(method.models(Build(task, data, ("pooled",), seed)))
    kept = scratch / "pooled" / "home" / "pooled" / "pooled" / "models" / "local-last.safetensors"
    models.load_state_dict(store.read(kept)[0])

    def accuracy(samples: Samples) -> float:
        evaluation = evaluate(method, "local", models, task, samples, torch.device("cpu"))
        assert evaluation is not None
        return evaluation.metrics["accuracy"]

    # FLamby tests the pooled model on rows standardised by centre, though it learnt from rows standardised together.
    by_centre = {site: accuracy(task.load(load_site_file(files[site])).splits["test"]) for site in SITES}
    together = data.splits["test"]
    with_pooled = {}
    for site in SITES:
        mine = np.array([name.startswith(f"processed.{HOSPITALS[site]}.data:") for name in together.names])
        chosen = torch.from_numpy(np.flatnonzero(mine))
        names = [name for name, own in zip(together.names, mine, strict=True) if own]
        with_pooled[site] = accuracy(
            Samples(together.inputs[chosen], together.targets[chosen], np.arange(len(names)), names)
        )
    return {POOLED: by_centre, POOLED_OWN: with_pooled}


def read_published(folder: Path, seeds: list[int]) -> dict[str, dict[str, list[float]]]:
    """FLamby's own accuracies from its ``heart_seed<N>.csv``: our method's name to hospital to one value a seed.

    Raises:
        MedPFLError: a file or a row is missing.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        path = folder / f"heart_seed{seed}.csv"
        try:
            with open(path, encoding="utf-8", newline="") as stream:
                metrics = {(row["Method"], row["Test"]): row["Metric"] for row in csv.DictReader(stream)}
            for ours, theirs in PUBLISHED.items():
                for centre, site in enumerate(SITES):
                    value = metrics[theirs.format(centre=centre), f"client_test_{centre}"]
                    found.setdefault(ours, {}).setdefault(site, []).append(round(float(value), 6))
        except OSError as error:
            raise MedPFLError(f"--flamby: cannot read {path}: {error.strerror}") from error
        except (KeyError, ValueError) as error:
            raise MedPFLError(f"--flamby: {path} is not a results file of FLamby's heart benchmark: {error}") from error
    return found


def table_of(results: dict[str, Any]) -> str:
    """Accuracy by method and hospital, mean and deviation over the seeds, beside FLamby's."""
    texts = []
    for start, title in (("flamby", "Initial weights as in FLamby"), ("own", "Initial weights of this package")):
        rows = []
        for method, found in results["accuracy"][start].items():
            rows.append([method, *_cells(found)])
            if method in results["published"]:
                rows.append([f"{method}: FLamby, published", *_cells(results["published"][method])])
        texts.append(f"{title}:\n\n" + markdown(["method", *SITES, "mean"], rows))
    return "\n\n".join(texts)


def _cells(found: dict[str, list[float]]) -> list[str]:
    means = np.mean([found[site] for site in SITES], axis=0)
    return [mean_sd(values) for values in (*(found[site] for site in SITES), means.tolist())]


def command(
    data: Annotated[Path | None, typer.Option(help="Folder with the UCI processed.*.data files.")] = None,
    flamby: Annotated[Path | None, typer.Option(help="Folder with FLamby's heart_seed<N>.csv.")] = None,
    seeds: SeedsOption = 5,
    out: OutOption = None,
) -> None:
    """FLamby's Fed-Heart-Disease protocol, with SoftPull beside it."""
    facts = machine()
    results = measure(data, seeds, flamby, say)
    write_json(out, "heart", facts, results)
    say(table_of(results))
