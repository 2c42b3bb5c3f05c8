# SPDX-License-Identifier: Apache-2.0
"""An architecture as a job names it: a frozen dataclass that builds the network for a task's inputs and classes."""

from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar

from torch import nn

from medpfl.core.checked import Checked


class Architecture(Checked):
    """A frozen dataclass whose fields are the job's arguments."""

    extractor: ClassVar[str | None] = None
    """Path of the module after which methods that split the network do so by default; None: a trial run finds it."""

    @property
    def multiple(self) -> int | None:
        """For segmentation: every length of an input must be a multiple of this. None: one result an input."""
        return None

    def multiples(self, axes: int) -> tuple[int, ...] | None:
        """The same for each of an input's ``axes`` by itself; where they differ, ``multiple`` suits all of them."""
        return None if self.multiple is None else (self.multiple,) * axes

    @property
    def fixed(self) -> bool:
        """Whether it takes inputs of that very size alone that it was built for, so that larger ones must be tiled."""
        return False

    @property
    def differs(self) -> bool:
        """Whether hospitals have different networks, whose weights cannot be averaged."""
        return False

    @property
    def named_hospitals(self) -> Collection[str]:
        """Hospitals that its arguments name; it is told where no hospital of a run has such a name."""
        return ()

    def at(self, site: str) -> "Architecture":
        """The architecture that this hospital uses; the same everywhere, unless the job says otherwise."""
        return self

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A new network, B x input_shape to B x outputs; its weights come from torch's global generator.

        Raises:
            ConfigError: the architecture cannot take inputs of this shape.
        """
