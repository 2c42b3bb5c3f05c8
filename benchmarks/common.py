# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: facts about the machine, means with deviations, and the JSON file."""

import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import medpfl
from medpfl.deployed.evaluate import write_text
from medpfl.results.compact import compact

SeedsOption = Annotated[int, typer.Option(help="Number of seeds.")]
OutOption = Annotated[Path | None, typer.Option(help="JSON file for the numbers and the machine's facts.")]
PlotOption = Annotated[Path | None, typer.Option(help="JSON file for the numbers; a plot is written beside it.")]


def machine() -> dict[str, Any]:
    """Processor, cores, versions and, because the machine may be shared, the load average at this moment."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "medpfl": medpfl.__version__,
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def resident(key: str, process: int | str = "self") -> float:
    """Resident memory (VmRSS) or its peak (VmHWM) in MB; getrusage would count the parent process's too.

    Raises:
        OSError: there is no such process any more.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = [line for line in lines if line.startswith(key)]
    return int(found[0].split()[1]) * 1024 / 1e6 if found else 0.0  # a process that is ending has no memory


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that is started here: it finds what is found here, this package too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def write_json(out: Path | None, name: str, facts: dict[str, Any], results: dict[str, Any]) -> None:
    """Write a benchmark's results with the facts that ``machine`` gave at its start; nothing where ``out`` is None.

    Raises:
        MedPFLError: the file cannot be written.
    """
    if out is None:
        return
    write_text(out, compact({"bench": name, "machine": facts, **results}))


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def mean_sd(values: Sequence[float]) -> str:
    """ "mean ± sd" of repeated runs (sample standard deviation; of a single run only the value)."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
