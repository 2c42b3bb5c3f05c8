# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a hospital's machine has, and whether the torch that is installed there can use them."""

import importlib
from collections.abc import Iterator, Sequence

from medpfl.core.devices import WANTED
from medpfl.flare.finding import Finding, note, ok, problem

GIB = 1 << 30


def gpus() -> Iterator[Finding]:
    """Name, memory, compute capability; driver's faults show as no GPU that torch can use."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield note("gpu", "not known without torch; none is required")
        return
    if not torch.cuda.is_available():
        yield note("gpu", "none that torch can use; none is required, training takes longer")
        return
    built = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        free, total = torch.cuda.mem_get_info(number)
        text = (
            f"{torch.cuda.get_device_name(number)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, "
            f"compute capability {major}.{minor}"
        )
        if runs_on(built, major, minor):
            yield ok("gpu", text)
        else:
            yield problem(
                "gpu",
                f"{text}, for which torch {torch.__version__} was not built ({', '.join(built)})",
                f"install a build of torch for it, or set {WANTED}=cpu",
            )


def runs_on(built: Sequence[str], major: int, minor: int) -> bool:
    """Whether a torch that was built for these architectures ("sm_80", "compute_90") runs on such a GPU: machine code
    runs on the same major number's later minor ones, intermediate code (compute) on every later one."""
    for name in built:
        kind, _, number = name.partition("_")
        digits = "".join(filter(str.isdigit, number))  # sm_90a
        if not digits:
            continue
        for_major, for_minor = divmod(int(digits), 10)
        if kind == "sm" and for_major == major and for_minor <= minor:
            return True
        if kind == "compute" and (for_major, for_minor) <= (major, minor):
            return True
    return False
