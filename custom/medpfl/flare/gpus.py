# SPDX-License-Identifier: Apache-2.0
"""Which GPUs a hospital's machine has, and whether the torch that is installed there can use them."""

import importlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from medpfl.core.devices import WANTED
from medpfl.flare.finding import Finding, note, ok, problem

GIB = 1 << 30


_PATIENCE = 20.0
"""Seconds for ``nvidia-smi``, which takes some where the driver sleeps."""


@dataclass(frozen=True)
class Driven:
    """A GPU as NVIDIA's driver names it, and the driver's version."""

    name: str
    driver: str


def gpus() -> Iterator[Finding]:
    """Name, free memory, compute capability and driver of each GPU that torch can use; and what keeps torch from one
    that the driver sees."""
    driven = seen_by_driver()
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield note("gpu", "not known without torch; none is required")
        return
    if not torch.cuda.is_available():
        if not driven:
            yield note("gpu", "none that torch can use; none is required, training takes longer")
            return
        built_for = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for processors only"
        yield note(
            "gpu",
            f"the driver ({driven[0].driver}) sees {', '.join(one.name for one in driven)}, but torch "
            f"{torch.__version__}, which is built {built_for}, cannot use it; training takes longer",
            "update the driver, or install a build of torch for it" if torch.version.cuda
            else "install a build of torch for CUDA (https://pytorch.org/get-started/locally)",
        )  # fmt: skip
        return
    built = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        try:
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as error:  # another process has it for itself, say, or it is broken
            yield problem(
                "gpu",
                f"{torch.cuda.get_device_name(number)} cannot be used now: {str(error).strip().partition(chr(10))[0]}",
                f"see what nvidia-smi says of it, or set {WANTED} to another one",
            )
            continue
        text = (
            f"{torch.cuda.get_device_name(number)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, "
            f"compute capability {major}.{minor}, driver {driven[0].driver if driven else 'not known'}"
        )
        if runs_on(built, major, minor):
            yield ok("gpu", text)
        else:
            yield problem(
                "gpu",
                f"{text}, for which torch {torch.__version__} was not built ({', '.join(built)})",
                f"install a build of torch for it, or set {WANTED}=cpu",
            )


def seen_by_driver() -> list[Driven]:
    """What ``nvidia-smi`` lists, in its order; nothing where it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=_PATIENCE, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = (line.rsplit(",", 1) for line in answer.splitlines() if "," in line)
    return [Driven(name.strip(), driver.strip()) for name, driver in pairs]


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
