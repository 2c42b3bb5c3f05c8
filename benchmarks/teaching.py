# SPDX-License-Identifier: Apache-2.0
"""``benchmarks teaching``: a local round with CusFL's teacher, as a multiple of local training of the same network.

Both train on the same batches of generated images, in turns, in one process with one thread; the ratio is the median of
those within a turn. Seconds are the process's own, so that other work on the machine does not count.
"""

import time
from typing import Any

import numpy as np

from benchmarks.common import markdown
from medpfl.core.errors import MedPFLError

TARGET = 1.5
BATCH = 32
SIZE = (48, 64)


def measure(images: int, repeats: int) -> dict[str, Any]:
    """Seconds and ratios for a ResNet18 of width 16 (split after "layer2") and for a UNet (its encoder)."""
    for name, value, least in (("images", images, BATCH), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    import torch

    from medpfl.models.resnet import ResNet
    from medpfl.models.unet import UNet
    from medpfl.tasks import Classification, Segmentation

    torch.set_num_threads(1)
    tasks = {
        "ResNet18, width 16": Classification("a", size=SIZE, architecture=ResNet(width=16)),
        "UNet 16-32-64-128": Segmentation("a", size=SIZE, architecture=UNet((16, 32, 64, 128))),
    }
    return {
        "images": images,
        "repeats": repeats,
        "networks": {name: _times(task, images, repeats) for name, task in tasks.items()},
    }


def _times(task: Any, images: int, repeats: int) -> dict[str, Any]:
    from medpfl.methods.cusfl import CusFL
    from medpfl.methods.local import Local
    from medpfl.methods.moon import Moon

    data = data_of(task, images, (3, *SIZE))
    sites = {
        "local": site_of(Local(batch_size=BATCH), task, data),
        "CusFL": site_of(CusFL(batch_size=BATCH), task, data),
        "MOON": site_of(Moon(batch_size=BATCH), task, data),
    }
    found = seconds_of(sites, repeats)
    return {
        "seconds": {name: round(float(np.median(times)), 4) for name, times in found.items()},
        "to_local": {
            name: round(float(np.median(np.array(times) / np.array(found["local"]))), 3)
            for name, times in found.items()
            if name != "local"
        },
    }


def seconds_of(sites: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of a local round of each, turn by turn, after one turn to warm up."""
    found: dict[str, list[float]] = {name: [] for name in sites}
    for turn in range(repeats + 1):
        for name, site in sites.items():
            started = time.process_time()
            site.method.local_round(site)
            if turn:
                found[name].append(time.process_time() - started)
    return found


def data_of(task: Any, images: int, shape: tuple[int, ...]) -> Any:
    """Generated images of two classes, or with masks."""
    import torch

    from medpfl.data.samples import Samples, SiteData

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(images, *shape, generator=generator)
    targets = inputs[:, 0].gt(0).long() if task.score == "dice" else inputs[:, 0].mean(dim=(1, 2)).gt(0).long()
    train = Samples(inputs, targets, np.arange(images), [str(number) for number in range(images)])
    return SiteData({"train": train}, ["no", "yes"])


def site_of(method: Any, task: Any, data: Any) -> Any:
    import torch

    from medpfl.methods.contract import Build, Hospital, Site

    build = Build(task, data, ("a",), 0, "a")
    models = torch.nn.ModuleDict(method.models(build))
    device = torch.device("cpu")
    hospital = Hospital(task=task, data=data, models=models, device=device, roster=("a",), name="a", seed=0)
    return Site(hospital, method, 1)


def table_of(results: dict[str, Any]) -> str:
    """Seconds a round and ratios, and whether the target is met."""
    rows = []
    for network, found in results["networks"].items():
        for name, seconds in found["seconds"].items():
            ratio = found["to_local"].get(name)
            verdict = f"{'met' if ratio <= TARGET else 'missed'} (at most {TARGET:g})" if name == "CusFL" else ""
            rows.append([f"{network}: {name}", f"{seconds:.2f}", "1" if ratio is None else f"{ratio:.2f}", verdict])
    return (
        f"{results['images']} images of {SIZE[1]} x {SIZE[0]}, batches of {BATCH}, one thread, processor time, "
        f"medians of {results['repeats']} turns:\n\n"
        + markdown(["local round", "seconds", "to local training", "target"], rows)
    )
