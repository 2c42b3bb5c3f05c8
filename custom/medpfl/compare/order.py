# SPDX-License-Identifier: Apache-2.0
"""What a worker process is told: a run, as it stands in its folder's order.json."""

import json
from pathlib import Path
from typing import ClassVar, Self

from medpfl.component import Spec
from medpfl.core.errors import MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.results.schema import Typed

FILE = "order.json"


class Places(Typed):
    """Where a run finds what it needs on this machine: nothing of it decides what it computes.

    Attributes:
        trained: its results and models are in its folder already, from FLARE.
        site_files: hospital to its site file.
    """

    trained: bool
    site_files: dict[str, str]

    @property
    def files(self) -> dict[str, Path]:
        return {site: Path(path) for site, path in self.site_files.items()}


class Order(Typed):
    """What every run's order says; ``splits``: hospital to the digest of how its data are cut."""

    worker: ClassVar[str]
    """The module that does such runs."""

    method: Spec
    task: Spec
    splits: dict[str, str]

    def write(self, folder: Path, places: Places) -> None:
        """Write order.json."""
        content = {**self.model_dump(mode="json"), "places": places.model_dump(mode="json")}
        write_text(folder / FILE, json.dumps(content, indent=1))

    @classmethod
    def read(cls, folder: Path) -> tuple[Self, Places]:
        """What ``write`` wrote.

        Raises:
            MedPFLError: it is of another version.
        """
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        try:
            places = Places.model_validate(content.pop("places", {}))
            return cls.model_validate(content), places
        except ValueError as error:  # pydantic's ValidationError
            raise MedPFLError(f"{folder / FILE} is of another version of MedPFL: {error}") from error


class RunOrder(Order):
    """A run of a comparison.

    Attributes:
        name: the method's name in the comparison.
        pooled: all data are trained on together.
        split: the seed of the split; None: as the site files cut.
        without: the hospital that takes no part and is tested, if any.
        searching: arguments are judged on validation; no test set is read.
        slots: slot to its component.
        codecs: by direction.
    """

    worker: ClassVar = "medpfl.compare.worker"

    name: str
    pooled: bool
    seed: int
    split: int | None
    without: str | None
    searching: bool
    rounds: int
    finetune: int
    slots: dict[str, Spec]
    codecs: dict[str, Spec | None] | None = None

    def specs(self) -> list[object]:
        """Everything that names classes."""
        return [self.task, self.method, self.slots, self.codecs]


class FoldOrder(Order):
    """A run of a leave-one-out: ``without`` takes no part and is tested; ``components``: those that the job names."""

    worker: ClassVar = "medpfl.compare.folds"

    job: str
    without: str
    settings: Spec
    components: dict[str, Spec]
