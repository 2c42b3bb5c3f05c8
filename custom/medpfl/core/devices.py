# SPDX-License-Identifier: Apache-2.0
"""Where networks are trained: the processor, or a GPU; and what is said when its memory does not suffice."""

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from medpfl.core.errors import ConfigError, OutOfMemory

if TYPE_CHECKING:
    from torch import Tensor, device

WANTED = "MEDPFL_DEVICE"
"""Environment variable: ``cpu``, ``cuda`` or ``cuda:1``. Not set: the first GPU where there is one."""
REPEATABLE = "MEDPFL_DETERMINISTIC"
"""Environment variable: ``1`` asks for the same bits of every run on the same GPU, which takes longer."""


def training_device(named: str | None = None, turn: int = 0) -> "device":
    """The device that this process trains and predicts on.

    On a GPU float32 is float32: convolutions do not round their inputs to 10 bits (TF32), as torch would have it.

    Args:
        named: by the hospital's site file; the environment comes first.
        turn: number of the hospital among those of this process, from 0, which take its GPUs in turn.

    Raises:
        ConfigError: the environment, or the site file, names a device that torch does not find here, or none at all.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(device_for(os.environ.get(WANTED, ""), named, turn, count))
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    _make_repeatable(device)
    return device


def device_for(wanted: str, named: str | None, turn: int, count: int) -> str:
    """The name of the device that a hospital takes.

    Args:
        wanted: by the environment; "": nothing.
        named: by the site file; None: nothing.
        turn: the hospital's number, from 0.
        count: how many GPUs torch finds.

    Raises:
        ConfigError: what is wanted, or else named, is no device, or is not there.
    """
    asked, where = (wanted, WANTED) if wanted else (named, "the site file's gpu.device")
    if not asked:
        return ("cuda" if turn % count == 0 else f"cuda:{turn % count}") if count else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", asked):
        raise ConfigError(f"{where} must be 'cpu', 'cuda' or 'cuda:NUMBER', got '{asked}'")
    if asked != "cpu" and int(asked.partition(":")[2] or 0) >= count:
        raise ConfigError(f"{where} is '{asked}', but torch finds {count or 'no'} GPU{'s' * (count > 1)} here")
    return asked


_SHARE = 10
"""Of the free memory of a GPU, one part of so many holds data where the site file does not say how much."""


def bytes_for_data(device: "device", cache_gb: float | None, hospitals: int = 1) -> int:
    """Bytes of data that may stay on the device: none on the processor, whose memory holds them anyway.

    Args:
        cache_gb: as the site file says, in 2**30 bytes; None: a tenth of what is free now.
        hospitals: of this process, which share its GPUs; all that are on one take no more than half of it together.
    """
    if device.type != "cuda":
        return 0
    if cache_gb is not None:
        return int(cache_gb * 2**30)
    import torch

    sharing = -(-hospitals // torch.cuda.device_count())
    return torch.cuda.mem_get_info(device)[0] // max(_SHARE, 2 * sharing)


def _make_repeatable(device: "device") -> None:
    import torch

    asked = os.environ.get(REPEATABLE, "0")
    if asked not in ("0", "1"):
        raise ConfigError(f"{REPEATABLE} must be 0 or 1, got '{asked}'")
    if asked == "1" and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself with this alone
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def spare_core(device: "device") -> bool:
    """Whether this process may prepare what comes next in a thread while it trains on ``device``: it has a second core,
    and trains on a GPU or in a single thread. The number of torch's threads is a setting of the whole process, which
    augmentation sets to one; where there are several, that would change sums."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1 and (device.type != "cpu" or torch.get_num_threads() == 1)


def current(device: "device") -> AbstractContextManager[object]:
    """While it lasts, this thread's GPU is that one: what torch asks of "the" GPU, or makes for it without being told
    which (locked memory), is else asked of the machine's first, and takes some of that one's memory."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def moved(tensor: "Tensor", device: "device") -> "Tensor":
    """``tensor`` on the device. To a GPU the copy goes from locked memory, while the processor goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        with current(device):  # threads that make batches ahead have a current GPU of their own
            return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def placed(tensor: "Tensor", device: "device") -> "Tensor":
    """The same of what stays there and may be large. torch keeps locked memory for as long as the process lives, and
    rounds it up to a power of two; so this goes without, and the processor waits once."""
    return tensor.to(device)


_NO_MEMORY = re.compile(
    r"CUDA( driver)? error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|(CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_ALLOC_FAILED"
)
"""What is said where memory is taken past torch's allocator: by the driver, cuBLAS, cuDNN. torch has no error class for
it. Locked memory, which is the processor's, is refused in the driver's words, too."""


@contextmanager
def memory_errors(hint: str) -> Iterator[None]:
    """What torch raises where memory does not suffice, as one sentence.

    Args:
        hint: what to make smaller, for the end of the sentence.

    Raises:
        OutOfMemory: in place of torch's and Python's errors. What was computed until then is forgotten, although the
            error is still at hand, and what the GPU's allocator held for later is given back.
    """
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        of_gpu = isinstance(error, torch.OutOfMemoryError) or bool(_NO_MEMORY.search(str(error)))
        # The processor's allocator has no error class of its own.
        if isinstance(error, RuntimeError) and not of_gpu and "DefaultCPUAllocator" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)
        if of_gpu:
            torch.cuda.empty_cache()
        whose = "the memory of this hospital's GPU" if of_gpu else "this hospital's memory"
        raise OutOfMemory(f"{whose} does not suffice: {hint}") from error
