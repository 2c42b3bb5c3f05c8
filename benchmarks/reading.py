# SPDX-License-Identifier: Apache-2.0
"""``benchmarks reading``: how quickly images come, beside the training that waits for them, and in what memory.

Fresh processes on one core with one thread: one reads JPEG files, makes batches as a round does and trains on them; one
reads data larger than their memory budget and says how far the process grew.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.common import environment, markdown, resident
from medpfl.core.errors import MedPFLError

SIZE = (48, 64)  # height and width the images are trained at
LARGE = (192, 256)  # for the memory: 0.6 MB an image
BATCH = 16
TARGET = 5.0
MEMORY, STREAMED, DECODE, TRAINING = "batches from memory", "batches from the scratch file", "first reading", "training"


def measure(images: int, repeats: int, budget_mb: float) -> dict[str, Any]:
    """Images per second of each step (medians), their ratios to training, and memory in MB (1e6 bytes).

    Args:
        images: number of JPEG files, 200 x 150 pixels.
        repeats: turns.
        budget_mb: memory budget of the second process.
    """
    for name, value, least in (("images", images, 100), ("repeats", repeats, 1), ("budget-mb", budget_mb, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value:g}")
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as folder:
        write_images(Path(folder), images)
        speeds = _in_process("speeds", {"folder": folder, "repeats": repeats})
        memory = _in_process("memory", {"folder": folder, "budget_mb": budget_mb})
    if memory["data_mb"] <= 2 * budget_mb:
        raise MedPFLError(f"{memory['data_mb']:.0f} MB of data do not exceed the budget twice; ask for more --images")
    training = speeds[TRAINING]
    ratios = {name: round(speed / training, 2) for name, speed in speeds.items() if name != TRAINING}
    return {"images": images, "repeats": repeats, "images_per_second": speeds, "to_training": ratios, "memory": memory}


def write_images(folder: Path, count: int) -> None:
    """JPEG files with smooth colours and some noise, about as large as photographs of skin are."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(60, 256, (8, 10, 3), dtype=np.uint8)).resize((200, 150))
        noisy = np.asarray(coarse, np.int16) + rng.integers(-12, 13, (150, 200, 3))
        place = folder / ("train" if number % 10 else "test") / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{number}.jpg", quality=90)


def _site_file(folder: Path, budget_mb: float) -> Any:
    from medpfl.data.site_file import load_site_file

    dataset = {
        "kind": "images",
        "files": "{split}/{class}/*.jpg",
        "label": {"column": "class", "classes": {"a": ["a"], "b": ["b"]}},
        "split": {"column": "split"},
    }
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump({"storage": {"memory_gb": budget_mb * 1e6 / 2**30}, "datasets": {"a": dataset}}))
    return load_site_file(path)


def _in_process(what: str, settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.reading", what, json.dumps(settings)]
    # glibc otherwise keeps what was freed, or not, as threads happened to come: twice the growth in one run of four.
    returned = {"MALLOC_TRIM_THRESHOLD_": "0"} if what == "memory" else {}
    environ = environment(OMP_NUM_THREADS="1", **returned)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MedPFLError(f"measuring {what} failed: {done.stderr.strip()[-300:] or 'out of memory, probably'}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _site(data: Any, task: Any) -> Any:
    import torch

    from medpfl.methods.contract import Hospital, Site
    from medpfl.methods.local import Local

    torch.manual_seed(0)
    models = torch.nn.ModuleDict({"local": task.network(data)})
    device = torch.device("cpu")
    hospital = Hospital(task=task, data=data, models=models, device=device, roster=("a",), name="a", seed=0)
    return Site(hospital, Local(batch_size=BATCH), 1)


def _all_batches(site: Any) -> None:
    for batch in site.training_batches():
        assert len(batch.inputs) == len(batch.targets)


def _speeds(folder: str, repeats: int) -> dict[str, float]:
    from medpfl.models.resnet import ResNet
    from medpfl.tasks import Classification

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    task = Classification("a", size=SIZE, architecture=ResNet(width=16))
    found: dict[str, list[float]] = {name: [] for name in (DECODE, MEMORY, STREAMED, TRAINING)}
    for _ in range(repeats + 1):
        started = time.perf_counter()
        data = task.load(_site_file(Path(folder), 1e5))
        found[DECODE].append(sum(map(len, data.splits.values())) / (time.perf_counter() - started))
        kept, streamed = _site(data, task), _site(task.load(_site_file(Path(folder), 0.001)), task)
        steps = {MEMORY: partial(_all_batches, kept), STREAMED: partial(_all_batches, streamed)}
        for name, step in {**steps, TRAINING: partial(kept.fit, "local")}.items():
            started = time.perf_counter()
            step()
            found[name].append(len(data.splits["train"]) / (time.perf_counter() - started))
    # The first turn warms up.
    return {name: round(float(np.median(speeds[1:])), 1) for name, speeds in found.items()}


def _memory(folder: str, budget_mb: float) -> dict[str, float]:
    from medpfl.data.images.declare import Images
    from medpfl.data.preparation import Spec
    from medpfl.data.rows import FileRows
    from medpfl.data.target import Target

    site_file = _site_file(Path(folder), budget_mb)
    dataset = site_file.dataset("a", Images)
    dataset.load(Spec(Target.CLASS, ("images",), (8, 8)))  # loads the libraries' code
    before = resident("VmRSS")
    data = dataset.load(Spec(Target.CLASS, ("images",), LARGE))
    inputs = data.splits["train"].inputs
    assert isinstance(inputs, FileRows)
    for start in range(0, len(inputs), BATCH):
        assert len(inputs[start : start + BATCH])
    total = sum(len(samples) for samples in data.splits.values()) * 4 * 3 * LARGE[0] * LARGE[1]
    return {"data_mb": total / 1e6, "budget_mb": budget_mb, "grown_mb": round(resident("VmHWM") - before, 1)}


def table_of(results: dict[str, Any]) -> str:
    """Images per second and ratios to training, whether the target is met, and the memory."""
    rows = []
    for name, speed in results["images_per_second"].items():
        ratio = results["to_training"].get(name)
        verdict = (
            f"{'met' if ratio >= TARGET else 'missed'} (at least {TARGET:g})" if name in (MEMORY, STREAMED) else ""
        )
        rows.append([name, f"{speed:.0f}", "1" if ratio is None else f"{ratio:.1f}", verdict])
    memory = results["memory"]
    return (
        f"{results['images']} JPEG files of 200 x 150 pixels at {SIZE[1]} x {SIZE[0]}, batches of {BATCH}, ResNet18 of "
        f"width 16, one core and thread, medians of {results['repeats']} turns:\n\n"
        + markdown(["step", "images per second", "to training", "target"], rows)
        + f"\n\n{memory['data_mb']:.0f} MB of decoded data ({LARGE[1]} x {LARGE[0]}) with a budget of "
        f"{memory['budget_mb']:g} MB: the process grew by {memory['grown_mb']:.0f} MB at most, reading them and then "
        "making all batches from the scratch file."
    )


if __name__ == "__main__":
    chosen: Callable[..., dict[str, float]] = {"speeds": _speeds, "memory": _memory}[sys.argv[1]]
    sys.stdout.write(json.dumps(chosen(**json.loads(sys.argv[2]))))
