# SPDX-License-Identifier: Apache-2.0
"""Which convolutions write outside their memory or compute wrong numbers, by memory order and instruction set.

    python -m benchmarks convolutions --out sweep.jsonl    # with the best instructions that the processor has
    ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks convolutions --out sweep.jsonl    # as on one without AVX-512
    python -m benchmarks convolutions --order contiguous --out sweep.jsonl
    python -m benchmarks convolutions --table sweep.jsonl

Every convolution runs forward and backward in a process of its own under a heap guard (``heap_guard.c``, compiled by
``cc``), which ends the process at the first byte outside an allocation, and its outputs and gradients are compared with
those of PyTorch's plain implementation (oneDNN switched off). What was found: docs/results/convolutions.md.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the heap guard's children fork from a process that imports torch only to sweep
    from torch import Tensor, nn

GUARD = Path(__file__).with_name("heap_guard.c")
KERNELS, STRIDES, SIZES = (1, 2, 3, 5, 7), (1, 2, 3), ((8, 8), (7, 10))
IN_CHANNELS, OUT_CHANNELS, BATCH = (*range(1, 18), 20, 24, 32, 48, 64), (2, 8, 20), 3
TOLERANCE = 1e-3
"""Largest difference allowed, relative to the largest magnitude of the reference."""


@dataclass(frozen=True)
class Case:
    """One convolution: ``kind`` "conv" or "transposed"; ``channels``: in and out; ``size``: height and width."""

    order: str
    kind: str
    kernel: int
    stride: int
    groups: int
    channels: tuple[int, int]
    batch: int
    size: tuple[int, int]


def cases(order: str) -> Iterator[Case]:
    """The sweep: every convolution in one group, in two where the channels allow it, and depthwise."""
    for kind, kernel, stride, size, entering in itertools.product(
        ("conv", "transposed"), KERNELS, STRIDES, SIZES, IN_CHANNELS
    ):
        if kernel > min(size):
            continue
        for leaving in OUT_CHANNELS:
            yield Case(order, kind, kernel, stride, 1, (entering, leaving), BATCH, size)
        if entering % 2 == 0:
            yield Case(order, kind, kernel, stride, 2, (entering, 8), BATCH, size)
        yield Case(order, kind, kernel, stride, entering, (entering, entering), BATCH, size)


def run(case: Case) -> str:
    """ "fine" or "wrong": whether outputs and gradients are those of the plain implementation. The heap guard
    ends the process where memory outside is touched."""
    import torch

    layer = {"conv": torch.nn.Conv2d, "transposed": torch.nn.ConvTranspose2d}[case.kind]
    torch.manual_seed(0)
    module = layer(*case.channels, case.kernel, stride=case.stride, groups=case.groups, padding=case.kernel // 2)
    images = torch.randn(case.batch, case.channels[0], *case.size)
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    expected = _pass(module, images)
    torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]
    last = case.order == "channels_last"
    given = images.contiguous(memory_format=torch.channels_last) if last else images
    for _ in range(2):
        found = _pass(module, given)
        for one, other in zip(expected, found, strict=True):
            if not (one - other).abs().max() <= TOLERANCE * max(1.0, float(one.abs().max())):
                return "wrong"
    return "fine"


def _pass(module: "nn.Module", images: "Tensor") -> "list[Tensor]":
    """Outputs, and the gradients towards images, weights and bias."""
    images = images.detach().requires_grad_()
    module.zero_grad()
    outputs = module(images)
    outputs.square().mean().backward()
    return [outputs.detach(), *(one.grad.clone() for one in (images, *module.parameters()) if one.grad is not None)]


def isolated(case: Case) -> str:
    """The verdict of ``run`` in a child; "corrupted" where the child did not end by itself."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            os._exit(0 if run(case) == "fine" else 1)
        except RuntimeError:
            os._exit(2)
    status = os.waitpid(child, 0)[1]
    return {0: "fine", 1: "wrong", 2: "refused"}.get(os.waitstatus_to_exitcode(status), "corrupted")


def sweep(output: Path, order: str) -> None:
    """Write a line for every convolution that is not fine, and one with the counts."""
    import torch

    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with output.open("a", encoding="utf-8") as file:
        for case in cases(order):
            verdict = isolated(case)
            counts[verdict] += 1
            if verdict != "fine":
                file.write(json.dumps({**asdict(case), "verdict": verdict}) + "\n")
                file.flush()
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "the processor's best")
        about = {"order": order, "torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
        file.write(json.dumps({**about, "onednn_isa": isa, "counts": counts}) + "\n")


def table_of(path: Path) -> str:
    """What was not fine, as a Markdown table: input channels by layer; before it the sweeps' counts."""
    found: dict[tuple[str, ...], set[int]] = {}
    counts = []
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "counts" in line:
            counts.append(f"{line}")
            continue
        depthwise = line["groups"] > 1 and line["groups"] == line["channels"][0]
        groups = "depthwise" if depthwise else line["groups"]
        key = (line["order"], line["verdict"], line["kind"], line["kernel"], line["stride"], groups)
        found.setdefault(tuple(map(str, key)), set()).add(line["channels"][0])
    head = [
        "| memory order | verdict | layer | kernel | stride | groups | input channels |",
        "|---|---|---|---:|---:|---|---|",
    ]
    rows = ["| " + " | ".join([*key, ", ".join(map(str, sorted(each)))]) + " |" for key, each in sorted(found.items())]
    return "\n".join([*counts, "", *head, *rows])


def guarded_sweep(output: Path, order: str) -> int:
    """``sweep`` under the heap guard; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        guard = Path(folder, "heap_guard.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(guard), str(GUARD)], check=True)
        command = [sys.executable, __file__, str(output), order]
        return subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(guard)}, check=False).returncode


if __name__ == "__main__":
    sweep(Path(sys.argv[1]), sys.argv[2])
