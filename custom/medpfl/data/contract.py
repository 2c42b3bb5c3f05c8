# SPDX-License-Identifier: Apache-2.0
"""What a kind of dataset is: cases that can be listed, read one by one, and loaded as a task wants them.

On the way back, ``Preparation.new_cases`` gives cases to predict, and ``NewCase.save`` writes what a network says of
one in the geometry of the hospital's file.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue, PrivateAttr, StrictBool

from medpfl.core.errors import DataError
from medpfl.data.columns import Column
from medpfl.data.declared import Problems, SplitRule, StorageRule, Strict
from medpfl.data.fingerprint import Fingerprint
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.samples import SiteData
from medpfl.data.target import Target


@dataclass(frozen=True)
class Case:
    """One case: a volume, an image, a recording, a row.

    Attributes:
        name: the hospital's name of it; it never leaves the hospital.
        group: whose it is; equal groups stay in one split.
        where: file and row or entry, for messages.
    """

    name: str
    group: str
    where: str


@dataclass(frozen=True)
class Item:
    """A case as it was read.

    Attributes:
        image: CHW[D] (or C x length, or F features) as in the file; NaN where a value is missing.
        target: class index, a label map HW[D] (uint8), the number to predict (float), or of several labels 1, 0 or NaN
            each (of survival, the time and whether the event came).
        affine: 4 x 4 voxel to mm (RAS), where the file has a geometry.
        placed: False of a file whose header leaves open how the volume lies, so that ``affine`` is the reader's guess.
    """

    image: NDArray[Any]
    target: int | float | tuple[float, ...] | NDArray[np.uint8]
    affine: NDArray[np.float64] | None = None
    placed: bool = True

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """Voxel size in mm along the image's own axes."""
        if self.affine is None:
            return None
        return tuple(float(length) for length in np.linalg.norm(self.affine[:3, :3], axis=0))


Listing = Mapping[str, Sequence[Any]]
"""Split to its cases (each kind has a ``Case`` of its own), in the list's order; "validation" may be empty."""


class Dataset(Strict, ABC):
    """A declared dataset; each kind is a subclass in a folder of its own.

    Attributes:
        public: the hospital says that anybody may have it: methods that exchange what networks say of public data, row
            by row, may take it as such. Of everything else only what a job has learnt leaves.
    """

    form: ClassVar[str]
    """The form of its samples; see ``Spec.forms``."""
    targets: ClassVar[tuple[Target, ...]]
    """What the answer to their cases can be; see ``Spec.target``."""
    preparation: ClassVar[type[Preparation]]
    agreed: ClassVar[tuple[str, ...]] = ()
    """Keys that all hospitals must declare alike, "masks.labels" for one in another; see ``Schema``."""

    kind: str
    split: SplitRule = SplitRule()
    public: StrictBool = False
    _folder: Path = PrivateAttr(default=Path())
    """Paths of the site file are relative to it."""
    _storage: StorageRule = PrivateAttr(default=StorageRule())

    @abstractmethod
    def class_names(self) -> list[str]:
        """Names of the classes in their order; none where the answer is a number."""

    @abstractmethod
    def cases(self, problems: Problems) -> Listing:
        """All cases, split by split, without reading them."""

    @property
    def target(self) -> Target:
        """What the answer to a case is, for a schema; kinds that can have several say which is declared."""
        return self.targets[0]

    def coding_of_masks(self) -> list[JsonValue]:
        """All by which the values of its label maps become the declared ones; of kinds without label maps: nothing."""
        return []

    def shown_columns(self, listing: Listing) -> list[Column]:
        """Every used column, for the data check; of kinds that are no table: none."""
        return []

    def owners(self) -> Iterator[tuple[str, list[str]]]:
        """Columns whose name says that they tell whose a case is, declared or not, each with the cells of the cases;
        for the data check. Of kinds that refuse data whose patients nothing names: none.

        Raises:
            DataError: they cannot be read.
        """
        return iter(())

    @abstractmethod
    def read(self, case: Any) -> Item:
        """Read and check one case.

        Raises:
            DataError: with the file, expected and got.
        """

    @abstractmethod
    def load(self, spec: Spec) -> SiteData:
        """All cases as a task wants them.

        Raises:
            DataError: with the file, expected and got; or the dataset declares no such target.
        """

    def fingerprint(self) -> Fingerprint:
        """What the training part is like, in a few numbers from which a network can be planned.

        Raises:
            DataError: there is no such thing of this kind, or a case cannot be read.
        """
        sentence = f"a network can be planned for volumes only; the dataset is of kind '{self.kind}'"
        raise DataError(sentence, public=sentence)

    @classmethod
    def gives(cls, spec: Spec) -> bool:
        """Whether datasets of this kind can be what a task wants."""
        return cls.form in spec.forms and spec.target in cls.targets
