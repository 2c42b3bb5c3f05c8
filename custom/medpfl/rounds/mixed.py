# SPDX-License-Identifier: Apache-2.0
"""What a hospital keeps of its models as they came out of the rounds' mixing: of the newest round, and of the best ones
so far, which are tested in the end."""

from collections.abc import Collection
from pathlib import Path

from torch import nn

from medpfl import store
from medpfl.core.tied import own_state
from medpfl.rounds.messages import load

MIXED = "mixed"


def keep_mixed(folder: Path, round_number: int, models: nn.ModuleDict, best: Collection[int]) -> None:
    """Keep the models, and of those kept before the rounds that are somebody's ``best``."""
    store.save(store.path_of(folder, MIXED, round_number), own_state(models), {"round": round_number})
    store.discard(folder, MIXED, {round_number, *best})


def load_mixed(folder: Path, round_number: int, models: nn.ModuleDict) -> str | None:
    """Put a round's tensors into the models; the reason, where they are not there."""
    path = store.path_of(folder, MIXED, round_number)
    if not path.exists():
        return "this hospital took no part in that round, so it has no such model"
    try:
        load(models, {"": store.read(path)[0]})
    except store.DamagedFile:
        return "the file that this hospital kept of it is damaged"
    return None
