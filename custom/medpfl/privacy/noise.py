# SPDX-License-Identifier: Apache-2.0
"""Where a hospital's noise comes from: secrets of its own, a cipher's key stream, and Opacus' optimiser for clipping.

The job's seed is known to the server and to every hospital, so nothing here depends on it alone: whoever knew the noise
could take it away, and whoever knew which cases a lot holds would not be fooled by the sampling. Nor is it torch's
generator, which on a processor takes 32 bits of a seed: whoever tried them all would have the noise within a day.
"""

import hashlib
import hmac
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor, nn

from medpfl.core.errors import ConfigError

FIXED = "MEDPFL_NOISE_SEED"
"""Environment variable of the hospital's process: a whole number from which its noise is made instead of from a secret,
so that a run can be repeated to the bit. For studies and tests: noise that others can compute hides nothing."""


def fixed_seed() -> int | None:
    """What the environment asks for; None: nothing.

    Raises:
        ConfigError: it is no whole number.
    """
    given = os.environ.get(FIXED)
    if given is None:
        return None
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"{FIXED} must be a whole number, got {given!r}") from None


def new_secret() -> str:
    """256 bits from the operating system, as hexadecimal digits."""
    return secrets.token_hex(32)


def fixed_secret(site: str) -> str | None:
    """What takes the place of this hospital's secret if the environment asks for it; else None."""
    fixed = fixed_seed()
    return None if fixed is None else hashlib.sha256(f"{fixed} {site}".encode()).hexdigest()


@dataclass(frozen=True)
class Stream:
    """Numbers that only the holder of the ``secret`` can compute; other ``parts``, other numbers."""

    secret: str
    parts: tuple[object, ...] = ()

    def of(self, *parts: object) -> "Stream":
        return Stream(self.secret, (*self.parts, *parts))

    def _key(self) -> bytes:
        """HMAC-SHA256 of the parts."""
        text = "\x1f".join(map(repr, self.parts))
        return hmac.new(bytes.fromhex(self.secret), text.encode(), hashlib.sha256).digest()

    def seed(self) -> int:
        """63 bits, for what need not be secret: torch's generator takes 32 of them on a processor."""
        return int.from_bytes(self._key()[:8], "big") >> 1

    def numbers(self) -> "Numbers":
        """From the beginning each time."""
        return Numbers(self._key())


class Numbers:
    """Random numbers from the key stream of AES-256 in counter mode, one after another.

    Args:
        key: of this use and no other, 32 bytes.
    """

    def __init__(self, key: bytes):
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def uniform(self, count: int) -> Tensor:
        """In [0, 1), in steps of 2^-53."""
        words = torch.frombuffer(bytearray(self._stream.update(bytes(8 * count))), dtype=torch.int64)
        return words.bitwise_and_(2**53 - 1).double().mul_(2.0**-53)

    def normal(self, count: int) -> Tensor:
        """Of mean 0 and deviation 1, by the method of Box and Muller; float64, as ``uniform``."""
        found = torch.empty(count, dtype=torch.float64)
        for start in range(0, count, _AT_ONCE):
            part = found[start : start + _AT_ONCE]
            half = (len(part) + 1) // 2
            length = (1 - self.uniform(half)).log_().mul_(-2).sqrt_()
            angle = self.uniform(half).mul_(2 * math.pi)
            part.copy_(torch.cat([length * angle.cos(), length * angle.sin()])[: len(part)])
        return found


_AT_ONCE = 2**15
"""Numbers that are made together: they stay in the processor's cache, and torch takes one thread for them, so that how
many it has changes no digit."""


class Gaussian:
    """A sum of tensors, each clipped by ``opacus.optimizers.DPOptimizer``, and noise on it, which is the sum of four
    draws, as in Opacus' secure mode (Holohan and Braghin, "Secure Random Sampling in Differential Privacy", 2021).
    All of it is in float32 or wider: a sum in a type of few digits is rounded at every addend, by more than the clip
    where many have come, so that one case could move it further than the noise is made for.

    Args:
        like: tensors of the shapes and the device of what is added up; all on one device.
        clip: largest Euclidean length of one addend, over all tensors together.
        noise_multiplier: standard deviation of the noise over ``clip``.
    """

    def __init__(self, like: Sequence[Tensor], clip: float, noise_multiplier: float):
        from opacus.optimizers import DPOptimizer

        self._types = [tensor.dtype for tensor in like]
        wide = [torch.promote_types(kind, torch.float32) for kind in self._types]
        self._sums = [nn.Parameter(torch.zeros_like(t, dtype=kind)) for t, kind in zip(like, wide, strict=True)]
        self._deviation = noise_multiplier * clip
        self._optimizer = DPOptimizer(
            torch.optim.SGD(self._sums, lr=1.0),
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip,
            expected_batch_size=None,
            loss_reduction="sum",
        )

    def add(self, addend: Sequence[Tensor] | None) -> None:
        """Add one, clipped; None: nothing, for an empty sum. One that is not finite counts as zero: no noise hides a
        NaN, so a server could send weights that overflow for one patient only and would see whether he is there."""
        if addend is not None:
            finite = torch.stack([one.detach().isfinite().all() for one in addend]).all()  # a GPU is not waited for
            addend = [torch.where(finite, one.detach(), 0.0) for one in addend]
        for place, one in enumerate(self._sums):
            found = one.detach()[None][:0] if addend is None else addend[place].detach()[None].to(one.dtype)
            one.grad_sample = found  # type: ignore[attr-defined]
        self._optimizer.clip_and_accumulate()

    @property
    def clipped(self) -> list[Tensor]:
        """The sum without noise. It must not leave."""
        return [one.summed_grad for one in self._sums]  # type: ignore[attr-defined]

    def with_noise(self, stream: Stream) -> list[Tensor]:
        """The sum with noise, each tensor of its own type; after this the object is used up."""
        numbers = stream.numbers()
        found = zip(self.clipped, self._types, strict=True)
        return [(one + self._noise(numbers, one)).to(kind) for one, kind in found]

    def _noise(self, numbers: Numbers, like: Tensor) -> Tensor:
        draws = numbers.normal(like.numel())
        for _ in range(3):
            draws += numbers.normal(like.numel())
        noise = draws.mul_(self._deviation / 2).reshape(like.shape)
        return noise.to(like.device, non_blocking=True)  # a GPU is not waited for
