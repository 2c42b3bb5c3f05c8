# SPDX-License-Identifier: Apache-2.0
"""A kind of dataset from somebody else's package: spectra as text files, one line a sample, its class first."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.contract import Case, Dataset, Item, Listing
from medpfl.data.declared import SPLITS, Problems
from medpfl.data.preparation import NewCase, Preparation, Spec
from medpfl.data.samples import Samples, SiteData
from medpfl.data.splits import choose
from medpfl.data.target import Target

KIND = "spectra.Spectra"


class SpectraPreparation(Preparation):
    """``top``: the largest value of the training part, which becomes 1."""

    form: ClassVar[str] = "rows"
    kind: str = KIND
    top: float

    def new_cases(self, path: Path, spec: Spec) -> Iterator[NewCase]:
        """One spectrum a line, without its class."""
        for number, row in enumerate(np.loadtxt(path, ndmin=2), start=1):
            yield NewCase(f"{path.name}:{number}", torch.from_numpy(row[None] / self.top).float())


@dataclass(frozen=True)
class Spectrum(Case):
    """One line. ``row``: its number."""

    row: int


class Spectra(Dataset):
    """``file``: lines of a class (0, 1, ...) and values; ``names``: the classes."""

    form: ClassVar[str] = "rows"
    targets: ClassVar[tuple[Target, ...]] = (Target.CLASS,)
    preparation: ClassVar[type[Preparation]] = SpectraPreparation

    file: str
    names: list[str]

    def class_names(self) -> list[str]:
        return self.names

    def cases(self, problems: Problems) -> Listing:
        count = len(self._lines())
        places = [f"{self.file}:{number}" for number in range(1, count + 1)]
        chosen = choose(self.split, places, problems, source=self.file)
        return {split: [Spectrum(places[i], places[i], places[i], i) for i in chosen[split]] for split in SPLITS}

    def read(self, case: Spectrum) -> Item:
        line = self._lines()[case.row]
        return Item(line[1:], int(line[0]))

    def load(self, spec: Spec) -> SiteData:
        lines, listing = self._lines(), self.cases(Problems())
        rows = {split: [case.row for case in cases] for split, cases in listing.items()}
        top = float(lines[rows["train"], 1:].max())
        splits = {
            split: Samples(
                torch.from_numpy(lines[mine, 1:] / top).float(),
                torch.from_numpy(lines[mine, 0]).long(),
                np.arange(len(mine)),
                [case.name for case in listing[split]],
                len(self.names),
            )
            for split, mine in rows.items()
        }
        return SiteData(splits, self.names, SpectraPreparation(top=top))

    def _lines(self) -> NDArray[np.float64]:
        try:
            return np.loadtxt(self._folder / self.file, ndmin=2)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.file}: cannot be read as spectra: {error}") from error
