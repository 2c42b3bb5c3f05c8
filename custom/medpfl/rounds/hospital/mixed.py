# SPDX-License-Identifier: Apache-2.0
"""What a hospital keeps of its models as they came out of the rounds' mixing: of the newest round, and of the best ones
so far, which are tested in the end.

They are written before the next round's training, which may be long, and a small file then moves into the one that is
written after it (``rounds.hospital.private``): of both, one has to be waited for until it is on the disk.
"""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from medpfl import store
from medpfl.rounds.hospital.private import MIXED_PART, PRIVATE
from medpfl.rounds.hospital.run_files import RunFiles
from medpfl.rounds.messages import load

MIXED = "mixed"
SMALL = 8 * 2**20
"""Bytes up to which waiting for the disk takes longer than writing twice."""


def keep_mixed(
    files: RunFiles,
    round_number: int,
    state: Mapping[str, Tensor],
    best: Collection[int],
    received: Mapping[str, Tensor] | None = None,
) -> None:
    """Keep the models, and of those kept before the rounds that are somebody's ``best``.

    Args:
        state: the networks' entries, which training is going to change.
        received: those of them that are still what the server sent: nobody writes to these tensors.
    """
    received = received or {}
    own = {key: tensor for key, tensor in state.items() if key not in received}
    files.save(MIXED, round_number, own, {"round": round_number}, synced=False, given=received)
    files.discard(MIXED, {round_number, *best})


def small_mixed(files: RunFiles, round_number: int) -> dict[str, Tensor]:
    """What was kept of a round, for the file that is about to be written; empty: nothing was, or it stays where it is
    and is on the disk now."""
    if not files.has(MIXED, round_number):
        return {}
    if files.size(MIXED, round_number) > SMALL:
        files.sync(MIXED, round_number)
        return {}
    try:
        return files.read(MIXED, round_number)
    except store.DamagedFile:  # is told where somebody wants it
        return {}


def drop_mixed(files: RunFiles, round_number: int) -> None:
    """What ``small_mixed`` gave lies elsewhere now."""
    files.remove(MIXED, round_number)


def load_mixed(files: RunFiles, round_number: int, models: nn.ModuleDict) -> str | None:
    """Put a round's tensors into the models; the reason, where they are not there."""
    missing = "this hospital took no part in that round, so it has no such model"
    try:
        if files.has(MIXED, round_number):
            found = files.read(MIXED, round_number)
        elif files.has(PRIVATE, round_number + 1):
            found = _part(files.read(PRIVATE, round_number + 1))
        else:
            return missing
    except store.DamagedFile:
        return "the file that this hospital kept of it is damaged"
    if not found:
        return missing
    load(models, {"": found})
    return None


def _part(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(MIXED_PART): tensor for key, tensor in tensors.items() if key.startswith(MIXED_PART)}
