# SPDX-License-Identifier: Apache-2.0
"""Where a hospital's noise comes from: secrets of its own, and Opacus' optimiser for clipping and noise.

The job's seed is known to the server and to every hospital, so nothing here depends on it alone: whoever knew the noise
could take it away, and whoever knew which cases a lot holds would not be fooled by the sampling.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
    """Seeds that only the holder of the ``secret`` can compute; other ``parts``, other seeds."""

    secret: str
    parts: tuple[object, ...] = ()

    def of(self, *parts: object) -> "Stream":
        return Stream(self.secret, (*self.parts, *parts))

    def seed(self) -> int:
        """HMAC-SHA256 of the parts, its first 63 bits."""
        text = "\x1f".join(map(repr, self.parts))
        digest = hmac.new(bytes.fromhex(self.secret), text.encode(), hashlib.sha256).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device=device).manual_seed(self.seed())


class Gaussian:
    """A sum of tensors, each clipped, and noise on it; by ``opacus.optimizers.DPOptimizer`` in its secure mode, whose
    noise is a sum of four draws (Holohan and Braghin, "Secure Random Sampling in Differential Privacy", 2021).

    Args:
        like: tensors of the shapes and the device of what is added up; all on one device.
        clip: largest Euclidean length of one addend, over all tensors together.
        noise_multiplier: standard deviation of the noise over ``clip``.
    """

    def __init__(self, like: Sequence[Tensor], clip: float, noise_multiplier: float):
        from opacus.optimizers import DPOptimizer

        self._sums = [nn.Parameter(torch.zeros_like(tensor)) for tensor in like]
        self._optimizer = DPOptimizer(
            torch.optim.SGD(self._sums, lr=1.0),
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip,
            expected_batch_size=None,
            loss_reduction="sum",
            secure_mode=True,
        )

    def add(self, addend: Sequence[Tensor] | None) -> None:
        """Add one, clipped; None: nothing, for an empty sum. One that is not finite counts as zero: no noise hides a
        NaN, so a server could send weights that overflow for one patient only and would see whether he is there."""
        if addend is not None:
            finite = torch.stack([one.detach().isfinite().all() for one in addend]).all()  # a GPU is not waited for
            addend = [torch.where(finite, one.detach(), 0.0) for one in addend]
        for place, one in enumerate(self._sums):
            found = one.detach()[None][:0] if addend is None else addend[place].detach()[None]
            one.grad_sample = found  # type: ignore[attr-defined]
        self._optimizer.clip_and_accumulate()

    @property
    def clipped(self) -> list[Tensor]:
        """The sum without noise. It must not leave."""
        return [one.summed_grad for one in self._sums]  # type: ignore[attr-defined]

    def with_noise(self, stream: Stream) -> list[Tensor]:
        """The sum with noise; after this the object is used up."""
        self._optimizer.generator = stream.generator(self._sums[0].device)
        self._optimizer.add_noise()
        return [one.grad for one in self._sums if one.grad is not None]
