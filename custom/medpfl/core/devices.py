# SPDX-License-Identifier: Apache-2.0
"""Where networks are trained: the processor, or a GPU; and what is said when its memory does not suffice."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from medpfl.core.errors import ConfigError, OutOfMemory

if TYPE_CHECKING:
    from torch import Tensor, device

WANTED = "MEDPFL_DEVICE"
"""Environment variable: ``cpu``, ``cuda`` or ``cuda:1``. Not set: the first GPU where there is one."""
REPEATABLE = "MEDPFL_DETERMINISTIC"
"""Environment variable: ``1`` asks for the same bits of every run on the same GPU, which takes longer."""


def training_device() -> "device":
    """The device that this process trains and predicts on.

    On a GPU float32 is float32: convolutions do not round their inputs to 10 bits (TF32), as torch would have it.

    Raises:
        ConfigError: the environment names a device that torch does not find here, or none at all.
    """
    import torch

    wanted = os.environ.get(WANTED, "")
    found = torch.cuda.is_available()
    try:
        device = torch.device(wanted or ("cuda" if found else "cpu"))
    except RuntimeError:
        raise ConfigError(f"{WANTED} must be 'cpu', 'cuda' or 'cuda:NUMBER', got '{wanted}'") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{WANTED} must be 'cpu', 'cuda' or 'cuda:NUMBER', got '{wanted}'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if found else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"{WANTED} is '{wanted}', but torch finds {count or 'no'} GPU{'s' * (count > 1)} here")
        torch.backends.cudnn.allow_tf32 = False
    _make_repeatable(device)
    return device


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


def moved(tensor: "Tensor", device: "device") -> "Tensor":
    """``tensor`` on the device. To a GPU the copy goes from locked memory, while the processor goes on."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


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
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        raise OutOfMemory(f"the memory of this hospital's GPU does not suffice: {hint}") from error
    except (MemoryError, RuntimeError) as error:
        # The processor's allocator has no error class of its own.
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory(f"this hospital's memory does not suffice: {hint}") from error
