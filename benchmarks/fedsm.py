# SPDX-License-Identifier: Apache-2.0
"""``benchmarks fedsm``: a round of FedSM beside one of FedAvg on the same data, what travels, and the selector.

Both run in process, taking turns, on the phantoms and with the settings of the shipped job fedsm_phantom; FedSM trains
its global and personal model and its selector, FedAvg one model. Times are of the processor, so that other work on the
machine does not count, and hold everything but the transport: training, further exchanges, mixing, validation, state on
disk. The bytes are those of the messages, beside what the configuration
of NVFlare's research example (research/fed-sm) adds up to: that is computed here, not run.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from benchmarks.common import OutOption, machine, markdown, write_json
from medpfl import store
from medpfl.bundle import find_job
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.data.site_file import load_site_file
from medpfl.demo.phantom import write_phantoms
from medpfl.job import Job, load_job
from medpfl.job.settings import Settings
from medpfl.methods.fedsm import FedSM
from medpfl.methods.references import like
from medpfl.models.selector import Vgg11
from medpfl.models.unet import UNet
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation

JOB = "fedsm_phantom"
FEDSM, FEDAVG = "FedSM", "FedAvg"
TARGET_TIME = 2.5  # times a round of FedAvg
TARGET_BYTES = 20  # times fewer than the research example


def measure(rounds: int, repeats: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of each round of both methods, turn by turn, and the bytes of a round.

    Args:
        rounds: of each method in each turn; the first is not counted.
        repeats: turns.
    """
    for name, value, least in (("rounds", rounds, 2), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    jobs = _jobs(rounds)
    seconds: dict[str, list[list[float]]] = {name: [] for name in jobs}
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        folder = Path(scratch)
        files = {site: folder / "sites" / f"{site}.yaml" for site in write_phantoms(folder / "sites")}
        for turn in range(repeats):
            for name, job in jobs.items():
                here = folder / f"{name}{turn}"
                stamps: list[float] = []
                simulate(job, files, here / "results", here / "home", partial(_stamp, stamps))
                seconds[name].append(np.diff(stamps).tolist())
            last = ", ".join(f"{name} {np.median(turns[-1]):.2f}" for name, turns in seconds.items())
            progress(f"turn {turn + 1}: {last} s a round")
        traffic = json.loads((folder / f"{FEDSM}0" / "results" / "bytes.json").read_text())
    ratios = [np.median(ours) / np.median(one) for ours, one in zip(seconds[FEDSM], seconds[FEDAVG], strict=True)]
    bytes_ = {
        direction: float(np.mean([line["raw"] for line in traffic if line["direction"] == direction]))
        for direction in ("to_site", "from_site")
    }
    return {
        "job": JOB,
        "hospitals": len(files),
        "seconds": seconds,
        "time_ratios": [round(float(ratio), 3) for ratio in ratios],
        "bytes": bytes_,
        "research_example": research_example(len(files)),
    }


def _stamp(stamps: list[float], _: Coordinator) -> None:
    stamps.append(time.process_time())


def selector_accuracy(seed: int) -> dict[str, dict[str, float]]:
    """Accuracy of the shipped job's selector on every hospital's test samples and cases, after all rounds.

    The selector does not depend on the other two models, so those are tiny here and take one step a round.

    Args:
        seed: changes the phantoms, the initial weights and the samples that are kept.
    """
    job = _jobs(1)[FEDSM]
    assert isinstance(job.method, FedSM) and isinstance(job.task, Segmentation)
    rounds = load_job(find_job(JOB)).settings
    assert isinstance(rounds, Settings)
    settings = replace(job.settings, rounds=rounds.rounds, seed=seed)
    task = replace(job.task, architecture=UNet((4, 8)))
    quick = replace(job, task=task, method=replace(job.method, steps=1), settings=settings)
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        folder = Path(scratch)
        files = {site: folder / "sites" / f"{site}.yaml" for site in write_phantoms(folder / "sites", seed)}
        simulate(quick, files, folder / "results", folder / "home")
        tensors, _ = store.read(folder / "results" / "slots" / "selector.safetensors")
        found = {}
        for index, (site, file) in enumerate(sorted(files.items())):
            samples = task.load(load_site_file(file, site)).splits["test"]
            network = job.method.selector.build(tuple(samples.inputs.shape[1:]), len(files))
            network.load_state_dict({key.partition("::selector.")[2]: value for key, value in tensors.items()})
            models = nn.ModuleDict({"selector": network})
            found[site] = job.method.diagnose(models, samples, index, torch.device("cpu"))
    return found


def _jobs(rounds: int) -> dict[str, Job]:
    job = load_job(find_job(JOB))
    assert isinstance(job, Job)
    ours = replace(job, settings=replace(job.settings, rounds=rounds, references=(), finetune=0))
    other = replace(ours, components={}, method=like("fedavg", job.method))
    return {FEDSM: ours, FEDAVG: other}


def research_example(hospitals: int) -> dict[str, int]:
    """Bytes a hospital, direction and round of NVFlare's research/fed-sm, from its configuration: two UNets (2-D, one
    channel in and out, channels 16 to 256, strides 2, two residual units) and VGG-11 with both moments of Adam, all
    float32."""
    from monai.networks import nets

    with torch.device("meta"):
        unet = nets.UNet(2, 1, 1, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2), num_res_units=2)
        vgg = Vgg11().build((1, 256, 256), hospitals)
    models, selector = (4 * sum(weight.numel() for weight in network.parameters()) for network in (unet, vgg))
    return {"models": 2 * models, "selector": 3 * selector, "total": 2 * models + 3 * selector}


def table_of(results: dict[str, Any]) -> str:
    """Both comparisons as Markdown tables, with whether the targets are met; the selector's accuracy where measured."""
    ratios, example = results["time_ratios"], results["research_example"]
    times = [[name, *(f"{np.median(turn):.2f}" for turn in turns)] for name, turns in results["seconds"].items()]
    times.append(["FedSM / FedAvg", *(f"{ratio:.2f}" for ratio in ratios)])
    middle, most = float(np.median(ratios)), max(results["bytes"].values())
    sizes = {
        "FedSM, to a hospital": results["bytes"]["to_site"],
        "FedSM, from a hospital": results["bytes"]["from_site"],
        "research example: both models": example["models"],
        "research example: selector with moments": example["selector"],
    }
    same_models = example["total"] / (example["models"] + most)
    accuracy = results.get("selector_accuracy")
    return "\n\n".join(
        [
            markdown(
                ["processor seconds a round (median)", *(f"turn {turn + 1}" for turn in range(len(ratios)))], times
            ),
            f"Median ratio {middle:.2f}; target at most {TARGET_TIME}: {_met(middle <= TARGET_TIME)}.",
            markdown(["a round and hospital", "MB"], [[name, f"{size / 1e6:.3f}"] for name, size in sizes.items()]),
            f"{example['total'] / most:.0f} times fewer bytes than the research example as the job is shipped, "
            f"{same_models:.0f} times fewer if the example's two UNets came on top; target {TARGET_BYTES}: "
            f"{_met(same_models >= TARGET_BYTES)}.",
            *([_accuracy_table(accuracy)] if accuracy else []),
        ]
    )


def _accuracy_table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Seeds by hospitals: accuracy of samples / of cases."""
    sites = list(next(iter(results.values())))
    rows = []
    for seed, found in results.items():
        pairs = [tuple(found[site].values()) for site in sites]
        pairs.append(tuple(np.mean(pairs, axis=0)))
        rows.append([f"seed {seed}", *(f"{sample:.3f} / {case:.3f}" for sample, case in pairs)])
    return markdown(["selector: samples / cases", *sites, "mean"], rows)


def _met(yes: bool) -> str:
    return "met" if yes else "missed"


def command(
    rounds: Annotated[int, typer.Option(help="Rounds of each method and turn; the first is not counted.")] = 4,
    repeats: Annotated[int, typer.Option(help="Turns; the median is reported.")] = 5,
    seeds: Annotated[int, typer.Option(help="Seeds of the selector's accuracy; 0: leave it out.")] = 3,
    out: OutOption = None,
) -> None:
    """A round of FedSM as a multiple of one of FedAvg, its bytes beside NVFlare's example, its selector's accuracy."""
    facts = machine()
    results = measure(rounds, repeats, say)
    results["selector_accuracy"] = {str(seed): selector_accuracy(seed) for seed in range(seeds)}
    write_json(out, "fedsm", facts, results)
    say(table_of(results))
