# SPDX-License-Identifier: Apache-2.0
"""Seeds derived from names, so that no process depends on what another one drew before."""

import hashlib


def derive_seed(*parts: str | int) -> int:
    """Seed in [0, 2^63) that depends on every part and on their order, the same on every machine.

    Used as ``derive_seed(seed, site, round, purpose)``; Python's own ``hash`` is salted per process and cannot be used.
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_torch(*parts: str | int) -> None:
    """``torch.manual_seed(derive_seed(*parts))``. Without a GPU that one keeps a stack trace of every call for ever, in
    case a GPU is found later: a hundred times as long, and memory that grows."""
    import torch  # here, because who only derives seeds (the demos) should not wait for it

    seed = derive_seed(*parts)
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
