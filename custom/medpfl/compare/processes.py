# SPDX-License-Identifier: Apache-2.0
"""A run in a process of its own, where it is to be done: on this machine, or at a worker of a Dask cluster.

Imports nothing large: a cluster's worker only starts such processes.
"""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import medpfl
from medpfl.core.devices import WANTED

RESULT, FAILURE, LOG = "run.json", "failure.txt", "log.txt"
_running: dict[str, subprocess.Popen[str]] = {}
_gpus_taken = Counter[str]()
_lock = threading.Lock()
_over = threading.Event()
"""No run is begun here any more."""


def run_in_process(module: str, part: str, version: str = medpfl.__version__) -> str | None:
    """Do the run that ``part``/order.json describes, by ``python -m MODULE PART``; returns why it failed, or None.

    Args:
        part: the run's folder while it is not finished.
        version: of MedPFL where the run was planned.
    """
    folder = Path(part)
    final = folder.with_name(folder.name.removesuffix(".part"))
    if (final / RESULT).is_file():  # another worker, thought dead, ended it
        return None
    if not folder.is_dir():
        return f"the cluster's worker sees no {folder}: results must lie on a disk that all workers see under one path"
    if version != medpfl.__version__:
        return f"the cluster's worker has MedPFL {medpfl.__version__}, and the comparison is of {version}"
    # One thread each; the same search path, so that a method found here is found there.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    gpu = _take_gpu()
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        with open(folder / LOG, "w", encoding="utf-8") as log:
            command = [sys.executable, "-m", module, part]
            with _lock:
                if _over.is_set():
                    return "it was not begun, because the comparison was ended"
                process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)
                _running[part] = process
            code = process.wait()
    finally:
        _running.pop(part, None)
        if gpu is not None:
            _gpus_taken[gpu] -= 1
    if (final / RESULT).is_file():
        return None
    if (folder / FAILURE).is_file():
        return (folder / FAILURE).read_text(encoding="utf-8")
    if code < 0:
        return f"its process was killed by signal {-code} (out of memory?)"
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not lines:  # whatever goes wrong is told in one of these files, where they can be written
        return f"exit code {code}, and not a word of why in {folder / LOG}: is the disk full?"
    return f"{_reason(lines)} (all of it: {folder / LOG})"


def _reason(lines: Sequence[str]) -> str:
    """The line that names the last error: its sentence may go on, and warnings may follow as the process ends."""
    begun = max((number for number, line in enumerate(lines) if line.startswith("Traceback (")), default=len(lines))
    return next((line for line in lines[begun + 1 :] if line[:1].strip()), lines[-1])


@contextmanager
def beginning() -> Iterator[None]:
    """While it lasts runs are begun here. If it is left by an exception, those are ended, and none is begun after them:
    whoever waits for a run would take the next one as soon as that is ended."""
    _over.clear()
    try:
        yield
    except BaseException:
        with _lock:
            _over.set()
            begun = list(_running.values())
        for process in begun:
            process.terminate()
        raise


def _take_gpu() -> str | None:
    """The one that the fewest runs begun here have, of several; None where there is at most one, or where the
    environment says on which all train: of a single visible one, "cuda:1" would not be there."""
    there = visible_gpus() if not os.environ.get(WANTED) else []
    if len(there) < 2:
        return None
    with _lock:
        gpu = min(there, key=lambda one: _gpus_taken[one])
        _gpus_taken[gpu] += 1
    return gpu


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. PyTorch is asked only where something has imported it or none are named."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [one.strip() for one in named.split(",") if one.strip()]
    if not Path("/dev/nvidiactl").exists():
        return []
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
