# SPDX-License-Identifier: Apache-2.0
"""Many hospitals in one process: networks, optimisers' state and data of those that are not at work lie in files.

They stay the same tensors and are read from their file as they are used, so a hospital needs nothing to go on, and
nothing that it computes depends on it.
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from medpfl.core.errors import MedPFLError
from medpfl.core.mapped import move_to_file
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.memory import WANTED, budget, resident

_BETWEEN = 0.05
"""Seconds in which a process does not take much more memory."""


class Parking:
    """Keeps this process's memory near a budget.

    Args:
        folder: for the files, which have no names and are gone when the process ends.
    """

    def __init__(self, folder: Path):
        self._folder, self._budget = folder, resident() + budget()
        self._looked = -_BETWEEN
        self.parks = False
        """Whether memory did not suffice yet."""
        self._log = logging.getLogger(__name__)

    def leave(self, runner: SiteRunner) -> None:
        """A hospital has answered; others are at work now.

        Raises:
            MedPFLError: the disk is full, or cannot be written.
        """
        if not self.parks and self._is_over():
            self.parks = True
            self._log.info(
                "hospitals that are not at work lie in files: this process may take %d MiB (%s)",
                self._budget // 2**20, WANTED,
            )  # fmt: skip
        if not self.parks:
            return
        try:
            move_to_file(_held(runner), self._folder / f".parked-{os.getpid()}")
        except OSError as error:
            raise MedPFLError(f"cannot keep {runner.name}'s networks in {self._folder}: {error.strerror}") from error

    def _is_over(self) -> bool:
        """Whether memory did not suffice when it was last looked at; a small network's round takes hardly longer."""
        now = time.monotonic()
        if now - self._looked < _BETWEEN:
            return False
        self._looked = now
        return resident() > self._budget


def _held(runner: SiteRunner) -> Iterator[Tensor]:
    """What a hospital holds between its answers. Gradients are not: every step makes them anew."""
    if not runner.begun:
        return
    for parameter in runner.models.parameters():
        parameter.grad = None
        yield parameter
    yield from runner.models.buffers()
    for optimizer in runner.run.optimizers.values() if runner.run.entered else ():
        for state in optimizer.state.values():
            yield from (entry for entry in state.values() if isinstance(entry, Tensor))
    for samples in runner.data.splits.values():
        yield from (rows for rows in (samples.inputs, samples.targets) if isinstance(rows, Tensor))
