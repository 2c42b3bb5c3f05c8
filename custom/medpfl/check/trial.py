# SPDX-License-Identifier: Apache-2.0
"""Could a job run on a hospital's data? Its task loads them, and its network sees a first batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from medpfl.check.advice import advice
from medpfl.check.inspection import Split
from medpfl.core.errors import MedPFLError
from medpfl.data.rows import held
from medpfl.data.site_file import SiteFile
from medpfl.tasks.contract import Task

BATCH = 2  # samples that the network is tried on


@dataclass(frozen=True)
class Trial:
    """How it went.

    Attributes:
        job: the job's name.
        failure: why the job could not run here, one sentence; "" if it can.
        samples: prepared samples of each split.
        shape: of one sample.
        parameters: of the network; the same at every hospital, or the server refuses the one that deviates.
        memory: bytes of prepared data held in memory.
        scratch: bytes of prepared data held in the scratch folder.
        warnings: what may be wrong between the job and the data.
    """

    job: str
    failure: str = ""
    samples: dict[str, int] | None = None
    shape: tuple[int, ...] = ()
    parameters: int = 0
    memory: int = 0
    scratch: int = 0
    warnings: list[str] = field(default_factory=list)


def try_job(
    job: str, task: Task, site_file: SiteFile, site: str | None = None, splits: Mapping[str, Split] | None = None
) -> Trial:
    """Load a job's data as the job would, and compute its loss on a few training samples.

    Args:
        site_file: freshly loaded; an inspected dataset has left out rows with problems.
        site: the hospital's name, which a job with another network at every hospital asks for.
        splits: what was found in the dataset's files, for comparison; None: not known.
    """
    try:
        task = (task.at(site) if site else task).chosen(site_file)
        data = task.load(site_file)
        task = task.informed(data)
    except MedPFLError as error:
        return Trial(job, str(error))
    parts = [rows for samples in data.splits.values() for rows in (samples.inputs, samples.targets)]
    memory, scratch = (sum(sizes) for sizes in zip(*map(held, parts), strict=True))
    samples = {split: len(part) for split, part in data.splits.items()}
    shape = data.input_shape
    if task.to_be_planned:  # its size is the largest patch that may be planned
        return Trial(job, "", samples, shape, 0, memory, scratch, advice(task, data, 0, splits or {}))
    try:
        network = task.network(data).eval()
        with torch.no_grad():
            loss = task.loss(network(data.splits["train"].inputs[:BATCH]), data.splits["train"].targets[:BATCH])
    except MedPFLError as error:
        return Trial(job, str(error), samples, shape)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        return Trial(job, f"the job's network cannot be trained on samples of shape {shape}: {reason}", samples, shape)
    failure = "" if bool(torch.isfinite(loss)) else f"the job's loss on the first training samples is {float(loss)}"
    parameters = sum(parameter.numel() for parameter in network.parameters())
    warnings = advice(task, data, parameters, splits or {})
    return Trial(job, failure, samples, shape, parameters, memory, scratch, warnings)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
