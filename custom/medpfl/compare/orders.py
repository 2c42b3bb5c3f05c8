# SPDX-License-Identifier: Apache-2.0
"""What a worker process is told, as types: ``order.json``. A field is a key of the file, under the same name."""

from typing import ClassVar

from pydantic import Field, JsonValue

from medpfl.results.schema import Typed

Config = dict[str, JsonValue]
"""A component's configuration: its class and arguments."""


class Handed(Typed):
    """What is added to every order.

    Attributes:
        worker: the module that does such runs.
        code: digest of the code that the run's own digest covers.
        trained: the run's results and models are in its folder already, from FLARE.
        site_files: of all hospitals, as absolute paths.
    """

    worker: ClassVar[str]

    code: str = Field(default="", exclude_if=lambda found: not found)
    trained: bool = False
    site_files: dict[str, str] = Field(default_factory=dict)


class Specs(Typed):
    """The configurations of a method, of each slot's server component, and of its codecs, if it has any."""

    method: Config
    slots: dict[str, Config]
    codecs: dict[str, Config | None] | None = Field(default=None, exclude_if=lambda found: found is None)


class Order(Specs, Handed):
    """One run of a comparison.

    Attributes:
        name: of the method in the comparison.
        pooled: whether one model is trained on all data together.
        split: seed of the split; None: as the site files cut.
        without: the hospital that takes no part and is tested, if any.
        searching: the run judges arguments on validation; it reads no test set.
        splits: hospital to the digest of its samples and of how they are cut.
        held: hospital to the SHA-256 of each checkpoint and public dataset that the method uses, if it uses any.
    """

    worker: ClassVar[str] = "medpfl.compare.worker"

    name: str
    pooled: bool
    seed: int
    split: int | None
    without: str | None
    searching: bool
    rounds: int
    finetune: int
    task: Config
    splits: dict[str, str]
    held: dict[str, dict[str, str]] = Field(default_factory=dict, exclude_if=lambda found: not found)

    def configurations(self) -> list[JsonValue]:
        """Everything that names classes."""
        return [self.task, self.method, dict(self.slots), None if self.codecs is None else dict(self.codecs)]


class FoldOrder(Handed):
    """One run of a leave-one-out; ``settings`` and ``codecs``: of the job; ``min_clients``: of the run; ``held``: as of
    a comparison's."""

    worker: ClassVar[str] = "medpfl.compare.folds"

    job: str
    without: str
    settings: dict[str, JsonValue]
    components: dict[str, Config]
    method: Config
    task: Config
    splits: dict[str, str]
    codecs: Config | None = Field(default=None, exclude_if=lambda found: found is None)
    min_clients: int
    held: dict[str, dict[str, str]] = Field(default_factory=dict, exclude_if=lambda found: not found)

    def configurations(self) -> list[JsonValue]:
        """Everything that names classes."""
        return [self.method, self.task, dict(self.components), self.codecs]
