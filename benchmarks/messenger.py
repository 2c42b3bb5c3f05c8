# SPDX-License-Identifier: Apache-2.0
"""``benchmarks messenger``: MH-pFLID's messenger beside the hospitals' networks: weights, work, bytes, time.

Multiplications are counted by torch's own counter in one forward pass. Bytes are those of the messages' tensors. Times
are of the processor, in turns, one thread: a round of MH-pFLID (4 epochs of injection, 1 of distillation) to local
training of the same network for as many epochs (5).
"""

from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import OutOption, machine, markdown, write_json
from benchmarks.teaching import BATCH, SIZE, data_of, seconds_of, site_of
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

TARGET_TIME = 2.0
TARGET_BYTES = 5.0


def measure(images: int, repeats: int) -> dict[str, Any]:
    """Sizes and times for the networks of the shipped jobs and for one of the paper's size, whose sizes are also taken
    on images as large as the paper's.

    Args:
        images: of each local data set.
        repeats: turns; medians are reported.
    """
    for name, value, least in (("images", images, BATCH), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    import torch

    from medpfl.bundle import find_job
    from medpfl.job import Job, load_job
    from medpfl.models.resnet import ResNet
    from medpfl.tasks import Classification

    torch.set_num_threads(1)
    found = []
    large = ResNet(width=64)
    paper: dict[tuple[int, ...], str] = {(3, 384, 384): "BreaKHis", (1, 256, 256): "OCT 2017"}
    for shape, name in paper.items():
        task = Classification("a", size=shape[1:], architecture=large)
        found.append({"job": f"the paper's {name}", "network": "ResNet18", **_sizes(task, shape)})
    task = Classification("a", size=SIZE, architecture=large)
    times = _times(task, images, repeats)
    found.append({"job": "skin", "network": "ResNet18", **_sizes(task, (3, *SIZE)), "to_local": times})
    for name in ("mhpflid_skin_resolution", "mhpflid_skin", "mhpflid_skin_lesion"):
        job = load_job(find_job(name))
        assert isinstance(job, Job)
        for site in job.task.architecture.hospitals:  # type: ignore[attr-defined]
            own = job.task.at(site)
            kind = f"{site}, {type(own.architecture).__name__}"  # type: ignore[attr-defined]
            times = _times(own, images, repeats)
            found.append({"job": name, "network": kind, **_sizes(own, (3, *SIZE)), "to_local": times})
    return {"images": images, "repeats": repeats, "networks": found}


def _sizes(task: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Weights, multiplications and bytes of the network and of its messenger."""
    import torch
    from torch import nn

    from medpfl.methods.contract import Build
    from medpfl.methods.mh_pflid import MHpFLID
    from medpfl.rounds.messages import byte_count, gather

    method = MHpFLID()
    data = data_of(task, 2, shape)
    models = nn.ModuleDict(method.models(Build(task, data, ("a",), 0, "a")))
    messenger, local = models["messenger"], models["local_network"]
    everything = {"local": list(local.state_dict())}
    return {
        "shape": list(shape),
        "weights": [_weights(local), _weights(messenger)],
        "multiplications": [_work(local, torch.zeros(1, *shape)), _work(messenger, torch.zeros(1, *shape))],
        "bytes": [
            byte_count(gather(local.state_dict(), everything, ["local"])),
            byte_count(gather(models.state_dict(), method.slots(models), ["messenger"])),
        ],
    }


def _weights(network: Any) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _work(network: Any, inputs: Any) -> int:
    """Multiplications of one forward pass."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        network.eval()(inputs)
    network.train()
    return int(counter.get_total_flops()) // 2


def _times(task: Any, images: int, repeats: int) -> float:
    """Median ratio of a round to local training."""
    from medpfl.methods.local import Local
    from medpfl.methods.mh_pflid import MHpFLID

    data = data_of(task, images, (3, *SIZE))
    sites = {
        "local": site_of(Local(batch_size=BATCH, epochs=5), task, data),
        "MH-pFLID": site_of(MHpFLID(batch_size=BATCH), task, data),
    }
    found = seconds_of(sites, repeats)
    return round(float(np.median(np.array(found["MH-pFLID"]) / np.array(found["local"]))), 3)


def table_of(results: dict[str, Any]) -> str:
    """One row a network, with whether the targets are met."""
    rows = []
    for found in results["networks"]:
        (local, messenger), ratio = found["weights"], found["bytes"][0] / found["bytes"][1]
        work = [f"{count / 1e9:.4f}" for count in found["multiplications"]]
        time = found.get("to_local")
        rows.append(
            [
                f"{found['job']}: {found['network']}",
                " x ".join(map(str, found["shape"])),
                f"{local / 1e6:.3f} / {messenger / 1e6:.3f}",
                " / ".join(work),
                f"{ratio:.1f}{'' if ratio >= TARGET_BYTES else ' (below the target)'}",
                "" if time is None else f"{time:.2f}{'' if time <= TARGET_TIME else ' (above the target)'}",
            ]
        )
    heads = ["network", "input", "million weights", "billion multiplications", "bytes", "time"]
    told = (
        "Local network / messenger. Bytes: the local network's as a multiple of the messenger's, target at least "
        f"{TARGET_BYTES:g}. Time: a round to local training of as many epochs, target at most {TARGET_TIME:g}; "
        f"{results['images']} images, batches of {BATCH}, medians of {results['repeats']} turns."
    )
    return f"{told}\n\n{markdown(heads, rows)}"


def command(
    images: Annotated[int, typer.Option(help="Number of generated images.")] = 160,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    out: OutOption = None,
) -> None:
    """MH-pFLID's messenger beside the hospitals' networks: weights, multiplications, bytes, and time of a round."""
    facts = machine()
    results = measure(images, repeats)
    write_json(out, "messenger", facts, results)
    say(table_of(results))
