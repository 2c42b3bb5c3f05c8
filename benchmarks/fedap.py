# SPDX-License-Identifier: Apache-2.0
"""``benchmarks fedap``: does W find the hospitals that share labels, and does that help? And what does it cost?

Twenty hospitals share generated images by the pairwise cut of FedAP's experiments. All differ in labels, none in how
images look. W is made before training, from the features of a network pretrained on a fifth of the training data.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.blobs import write_blobs
from benchmarks.common import OutOption, SeedsOption, machine, markdown, mean_sd, write_json
from benchmarks.studies import write_cut
from medpfl import store
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mean, Mixer, RoundInfo, SoftPull, StatisticsDistance
from medpfl.core.mixing import Matrix
from medpfl.data.partition import label_counts
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import load_site_file
from medpfl.demo.index_lists import declare_checkpoint, labels_of
from medpfl.deployed.evaluate import evaluate, write_text
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Hospital, Method, Site
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedbn import FedBN
from medpfl.models.contract import Architecture
from medpfl.models.lenet import LeNet5
from medpfl.models.resnet import ResNet
from medpfl.results.compact import compact
from medpfl.results.files import read_summary
from medpfl.results.tables import result_table
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.pretrain import pretrain
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from medpfl.tasks.classification import Classification

HOSPITALS, ROWS, CLASSES = 20, 150, 10
ALPHA, NOISE = 0.1, 0.4
FRACTIONS = {"train": 0.4, "validation": 0.2, "test": 0.4}
SHARE, EPOCHS = 0.2, 30
LAM = 0.5
TRAINING: dict[str, Any] = {"lr": 0.002, "batch_size": 32}
CHECKPOINT = "pretrained"
OURS, EQUAL = "FedAP", "FedAP, equal weights"


def setup(rounds: int) -> dict[str, Any]:
    """What the numbers depend on, for the result file."""
    about = {"hospitals": HOSPITALS, "rows": ROWS, "classes": CLASSES, "alpha": ALPHA, "noise": NOISE, "lam": LAM}
    return {**about, "fractions": FRACTIONS, "share": SHARE, "epochs": EPOCHS, "rounds": rounds, **TRAINING}


def measure(seeds: int, rounds: int, progress: Callable[[str], None], out: Path | None = None) -> dict[str, Any]:
    """Run every method with seeds 0, 1, ...; a seed changes images, cut, initial weights and batches.

    Seeds that an earlier run with the same setup left in ``out`` are not repeated.

    Returns:
        Test accuracies (mean over the hospitals, round by validation) and rank correlations, seed by seed.
    """
    if seeds < 1 or rounds < 1:
        raise MedPFLError(f"--seeds and --rounds must be at least 1, got {seeds} and {rounds}")
    results: dict[str, Any] = {"setup": setup(rounds), "seeds": {}}
    if out and out.is_file():
        kept = json.loads(out.read_text(encoding="utf-8")).get("study", {})
        if kept.get("setup") == results["setup"]:
            results["seeds"] = kept["seeds"]
    for seed in range(seeds):
        if str(seed) in results["seeds"]:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
            found = _one_seed(Path(scratch), seed, rounds)
        results["seeds"][str(seed)] = found
        if out:
            write_text(out, compact({"study": results}))
        scores = ", ".join(f"{name} {value:.3f}" for name, value in found["test"].items())
        progress(f"seed {seed} ({time.monotonic() - started:.0f} s): {scores}; rank correlation {found['rank']}")
    return results


def _one_seed(folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    file, sites = folder / "patterns.npz", folder / "sites"
    write_blobs(file, {"train": ROWS * HOSPITALS}, CLASSES, seed, NOISE)
    names = write_cut(file, sites, "patterns", "pairwise", HOSPITALS, ALPHA, FRACTIONS, seed)
    files = {name: sites / f"{name}.yaml" for name in names}
    alike = shared_labels(file, sites)
    fedap = FedAP(pretrained=CHECKPOINT, **TRAINING)
    tensors, about = pretrain(_job(fedap, {}, rounds, seed), files, SHARE, EPOCHS)
    store.save(folder / "pretrained.safetensors", tensors, about.model_dump(mode="json"))
    declare_checkpoint(list(files.values()), CHECKPOINT, folder / "pretrained.safetensors")
    runs: dict[str, tuple[Method, dict[str, Mixer]]] = {
        OURS: (fedap, {"fedavg": Mean(uniform=True), "model": StatisticsDistance(LAM)}),
        "FedBN": (FedBN(**TRAINING), {"model": Mean(uniform=True)}),
        EQUAL: (FedAP(**TRAINING), {"model": SoftPull(LAM)}),
    }
    scores: dict[str, float] = {}
    for name, (method, mixers) in runs.items():
        simulate(_job(method, mixers, rounds, seed), files, folder / name / "results", folder / name / "home")
        table = result_table(read_summary(folder / name / "results"))
        for label, value in zip(table.labels, table.mean, strict=True):
            scores[name if label == "Personal" else label] = round(float(value), 6)
    variants: dict[str, tuple[FedAP, StatisticsDistance]] = {
        "BatchNorm inputs, pretrained": (fedap, StatisticsDistance(LAM)),
        "BatchNorm inputs, initial network": (FedAP(**TRAINING), StatisticsDistance(LAM)),
        "head inputs, pretrained (d-FedAP)": (fedap, StatisticsDistance(LAM, "head_inputs")),
    }
    ranks = {
        name: round(rank_correlation(_weights(_job(method, {"model": mixer}, rounds, seed), files, folder), alike), 4)
        for name, (method, mixer) in variants.items()
    }
    return {"test": scores, "rank": ranks, "label_distance": round(float(1 - _off_diagonal(alike).mean()), 4)}


def _job(method: Method, mixers: dict[str, Mixer], rounds: int, seed: int) -> Job:
    task = Classification("patterns", (28, 28), LeNet5(), "accuracy")
    references = ("local", "fedavg") if "fedavg" in mixers else ()
    settings = Settings(rounds=rounds, references=references, seed=seed, finetune=5)
    return Job("study", HOSPITALS, settings, mixers, method, task)


def shared_labels(file: Path, sites: Path) -> Matrix:
    """Share of labels that two hospitals have in common, K x K: 1 minus the total variation of their distributions."""
    labels = labels_of(file)
    lists = json.loads((sites / "lists.json").read_text(encoding="utf-8"))[:: len(FRACTIONS)]
    counts = np.array([label_counts(rows, labels, CLASSES) for rows in lists], dtype=float)
    shares = counts / counts.sum(axis=1, keepdims=True)
    common: Matrix = 1 - np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2
    return common


def rank_correlation(weights: Matrix, alike: Matrix) -> float:
    """Spearman's, over all ordered pairs of hospitals."""
    from scipy.stats import spearmanr

    return float(spearmanr(_off_diagonal(weights), _off_diagonal(alike)).statistic)


def _off_diagonal(matrix: Matrix) -> Matrix:
    return matrix[~np.eye(len(matrix), dtype=bool)]


def _weights(job: Job, files: dict[str, Path], folder: Path) -> Matrix:
    """W as the server makes it before round 1; nothing is trained."""

    def declared(name: str, path: Path) -> Callable[[], Any]:
        return lambda: load_site_file(path, name)

    runners = {
        name: SiteRunner(name, job.method, job.task, declared(name, path), folder / "weights" / name)
        for name, path in files.items()
    }
    home, results = folder / "weights" / "server", folder / "weights" / "results"
    coordinator = Coordinator(job, list(files), home, results)
    messages = coordinator.init_messages()
    coordinator.take_init({name: runners[name].handle(message) for name, message in messages.items()})
    requests = coordinator.rounds.statistics_messages(1, coordinator.joined)
    replies = {name: runners[name].handle(request) for name, request in requests.items()}
    coordinator.rounds.take_statistics(1, replies)
    about = RoundInfo(coordinator.roster, np.ones(len(files)), (True,) * len(files))
    return job.mixers["model"].matrix(about)


def cost(repeats: int = 21) -> dict[str, Any]:
    """The statistics pass as a multiple of an evaluation of the same data; W and one mix for 100 hospitals."""
    networks: dict[str, tuple[Architecture, tuple[int, int, int], int]] = {
        "LeNet5, 28 x 28": (LeNet5(), (1, 28, 28), 2000),
        "ResNet18 of width 16, 64 x 48": (ResNet(), (3, 48, 64), 1500),
    }
    passes = {name: _pass_ratio(*given, repeats) for name, given in networks.items()}
    return {"passes": passes, "scale": _scale(100, 1_000_000)}


def _pass_ratio(
    architecture: Architecture, shape: tuple[int, int, int], count: int, repeats: int
) -> dict[str, float | int]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % CLASSES
    names = [str(number) for number in range(count)]
    inputs = torch.randn(count, *shape, generator=generator)
    samples = Samples(inputs, targets, np.arange(count), names, CLASSES)
    data = SiteData(dict.fromkeys(("train", "validation", "test"), samples), [str(k) for k in range(CLASSES)])
    task = Classification("patterns", shape[1:], architecture)
    method, device = FedAP(), torch.device("cpu")
    models = nn.ModuleDict({"model": task.network(data)})
    hospital = Hospital(task=task, data=data, models=models, device=device, roster=("a",), name="a", seed=0)
    site = Site(hospital, method, 1)
    jobs: dict[str, Callable[[], object]] = {
        "evaluation": lambda: evaluate(method, "personal", models, task, samples, device),
        "statistics": lambda: method.statistics("batch_norm_inputs", site),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            started = time.process_time()  # of this process: other work on the machine does not count
            job()
            if turn:
                times[name].append(time.process_time() - started)
    ratio = np.median([a / b for a, b in zip(times["statistics"], times["evaluation"], strict=True)])
    seconds = {f"{name}_s": round(float(np.median(found)), 4) for name, found in times.items()}
    return {"images": count, **seconds, "ratio": round(float(ratio), 3)}


def _scale(hospitals: int, values: int) -> dict[str, float | int]:
    """Seconds to make W from the statistics of ten layers of 64 channels, and to mix once."""
    generator = torch.Generator().manual_seed(0)
    entries = [f"{layer}.{what}" for layer in range(10) for what in ("mean", "variance")]
    statistics = [
        {key: torch.rand(64, generator=generator, dtype=torch.float64) for key in entries} for _ in range(hospitals)
    ]
    states = [{"w": torch.randn(values, generator=generator)} for _ in range(hospitals)]
    about = RoundInfo(tuple(f"{k:03}" for k in range(hospitals)), np.ones(hospitals), (True,) * hospitals)
    mixer = StatisticsDistance(LAM)
    started = time.perf_counter()
    mixer.take_statistics(statistics, about)
    made = time.perf_counter()
    mixer.mix(states, about)
    mixed = time.perf_counter()
    seconds = {"weights_s": round(made - started, 4), "mix_s": round(mixed - made, 3)}
    return {"hospitals": hospitals, "values": values, **seconds}


def table_of(results: dict[str, Any]) -> str:
    """Both parts as text."""
    study, spent = results["study"], results["cost"]
    seeds = list(study["seeds"].values())
    rows = []
    for name in seeds[0]["test"]:
        values = [found["test"][name] for found in seeds]
        gains = [found["test"][OURS] - found["test"][name] for found in seeds]
        rows.append([name, mean_sd(values), "" if name == OURS else mean_sd(gains)])
    text = markdown(["model", "test accuracy", "FedAP minus it, seed by seed"], rows)
    ranks = [[name, mean_sd([found["rank"][name] for found in seeds])] for name in seeds[0]["rank"]]
    text += "\n\n" + markdown(["W from", "rank correlation of W with shared labels"], ranks)
    ratios = [
        [f"{name} ({found['images']} images)", f"{found['statistics_s']:.2f}", f"{found['ratio']:.2f}"]
        for name, found in spent["passes"].items()
    ]
    text += "\n\n" + markdown(["network", "statistics pass, CPU seconds", "to an evaluation epoch"], ratios)
    scale = spent["scale"]
    return text + (
        f"\n\n{scale['hospitals']} hospitals of {scale['values']} values: W in {scale['weights_s']:.3f} s, one mix in "
        f"{scale['mix_s']:.2f} s. {len(seeds)} seeds; mean (standard deviation)."
    )


def command(
    seeds: SeedsOption = 5,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 25,
    out: OutOption = None,
) -> None:
    """FedAP on 20 hospitals with unlike labels: does W find who shares them, and does it help; and what it costs."""
    facts = machine()
    results = {"study": measure(seeds, rounds, say, out), "cost": cost()}
    write_json(out, "fedap", facts, results)
    say(table_of(results))
