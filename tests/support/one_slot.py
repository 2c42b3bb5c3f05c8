# SPDX-License-Identifier: Apache-2.0
"""One slot at the server, round after round: the component with what is kept for it, without messages."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from medpfl.core.mixers import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State
from medpfl.rounds.server.copies import Copies
from medpfl.rounds.server.shelf import Shelf


class OneSlot:
    """``folder``: for models that lie in files; ``buffers``: entries that are no weights."""

    def __init__(
        self,
        mixer: Mixer,
        start: State,
        sizes: dict[str, float],
        folder: Path = Path("unused"),
        buffers: Collection[str] = (),
    ):
        self.mixer, self.sizes, self.folder = mixer, dict(sorted(sizes.items())), folder
        self.buffers = frozenset(buffers)
        self.copies = Copies({"slot": mixer}, list(self.sizes), Shelf(len(sizes), folder))
        self.copies.shelf.take({"slot": dict(start)})  # as the first message tells whether models fit into memory
        self.copies.shelf.open(folder / "models")
        self.copies.start({"slot": dict(start)})

    def mix(
        self, states: Sequence[State], present: Sequence[bool] | None = None
    ) -> tuple[list[dict[str, Tensor]], Matrix | None]:
        """The new states and the matrix; who is not ``present`` sends nothing."""
        here = tuple(present or [True] * len(self.sizes))
        sent = {
            site: self.copies.shelf.take({"slot": {key: tensor.clone() for key, tensor in state.items()}})
            for site, state, is_here in zip(self.sizes, states, here, strict=True)
            if is_here
        }
        info = RoundInfo(tuple(self.sizes), np.array(list(self.sizes.values())), here, buffers=self.buffers)
        matrices = self.copies.mix(["slot"], sent, info)
        return self.copies.stack["slot"], matrices.get("slot")

    def restarted(self, mixer: Mixer) -> "OneSlot":
        """The same with a new component, from what a checkpoint holds of this one."""
        other = OneSlot(mixer, self.copies.stack["slot"][0], self.sizes, self.folder, self.buffers)
        other.copies.restore({slot: list(states) for slot, states in self.copies.stack.items()}, self.copies.states())
        return other
