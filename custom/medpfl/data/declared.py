# SPDX-License-Identifier: Apache-2.0
"""Keys that several kinds of datasets have in the site file, and how problems with them are told."""

import math
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, field_validator, model_validator

from medpfl.core.errors import DataError
from medpfl.data.numbers import beyond_double

SPLITS = ("train", "validation", "test")


class Strict(BaseModel):
    """Unknown keys are errors; values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StorageRule(Strict):
    """Where decoded data are held: in memory up to ``memory_gb`` (2**30 bytes) a dataset, beyond that in an unnamed
    file in ``scratch`` (default: the system's temporary folder), which is gone when the process ends. What was prepared
    of volumes and images is kept in the folder ``cache``, if one is named, up to ``cache_gb`` (2**30 bytes)."""

    memory_gb: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    scratch: str | None = None
    cache: str | None = None
    cache_gb: float = Field(default=20.0, gt=0, allow_inf_nan=False)


class GpuRule(Strict):
    """``device``: on which this hospital trains, "cpu", "cuda" or "cuda:1", where the environment does not say it; by
    default the first GPU. ``cache_gb``: how much of training data may stay on a GPU (2**30 bytes), at least 0; by
    default a tenth of what is free there when the job starts."""

    device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")
    cache_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class SplitRule(Strict):
    """How a dataset is cut into train, validation and test when its list does not say so itself.

    ``column``: the column (or datalist field) that says train, validation or test; nothing is cut then.
    ``folds``: columns that cut the same rows in other ways, as in cross-validation; a comparison's ``splits`` number
    them from 0. Only with ``column``, which is the one that everything else takes.
    ``group``: the column (or datalist field) whose equal values must stay together, a patient identifier usually.
    ``stratify``: keep the class proportions (only without ``group``).
    ``file``: a CSV file beside the site file that says in which split each group is; see ``data.split_file``.
    """

    seed: int = Field(default=0, ge=0, lt=2**32)
    fractions: dict[Literal["train", "validation", "test"], float] = {"train": 0.6, "validation": 0.2, "test": 0.2}
    column: str | None = Field(default=None, min_length=1)
    folds: list[str] = []
    group: str | None = Field(default=None, min_length=1)
    stratify: bool = False
    file: str | None = Field(default=None, min_length=1)
    _folder: Path = PrivateAttr(default=Path())
    """The file's path is relative to it."""

    @property
    def path(self) -> Path:
        """Of ``file``, which is named."""
        return Path(self._folder, str(self.file))

    def need_group(self) -> None:
        """Raises ValueError where rows, which have no names, are to be found again in ``file``."""
        if self.file and not self.group:
            raise ValueError("'split.file' says where patients are; 'split.group' must name the column of their names")

    @model_validator(mode="after")
    def _consistent(self) -> "SplitRule":
        if not all(value > 0 for value in self.fractions.values()):
            raise ValueError("every fraction must be above 0 (leave a split out instead of giving it 0)")
        if not abs(sum(self.fractions.values()) - 1) <= 1e-6:
            raise ValueError(f"the fractions must sum to 1, got {sum(self.fractions.values()):g}")
        if not {"train", "test"} <= set(self.fractions):
            raise ValueError("the fractions need at least 'train' and 'test'")
        if self.group and self.stratify:
            raise ValueError("'group' and 'stratify' cannot be combined; groups are kept together, not stratified")
        if self.file and self.stratify:
            raise ValueError("'stratify' has no meaning beside 'file', which says where groups are; leave one out")
        if self.file and self.column:
            raise ValueError("both 'column' and 'file' name the splits; leave one out")
        if self.folds and not self.column:
            raise ValueError("'folds' are other columns beside 'column', which is missing")
        if self.column:
            for other in ("fractions", "stratify", "seed"):
                if other in self.model_fields_set:
                    raise ValueError(f"'column' names the splits, so '{other}' has nothing to cut; leave it out")
        return self


def canonical(value: str | float) -> str:
    """One text for each value of a column: "3", "3.0" and 3 are the same, and both forms of an accented letter. Codes
    of many digits are no others but themselves."""
    if isinstance(value, str) and "_" in value:  # of which Python would make a number, 15 of 1_5
        return composed(value)
    try:
        number = float(value)
    except ValueError:
        return composed(str(value))
    whole = beyond_double(value, number)
    return repr(number) if whole is None else str(whole)


def composed(text: str) -> str:
    """Letters with accents as one sign each (NFC). File names of a Mac's archives have the accents apart (NFD)."""
    return unicodedata.normalize("NFC", text)


def no_truths(values: Iterable[Any]) -> None:
    """Raises ValueError where one of the values, or keys, is a truth value, as YAML reads an unquoted yes or no."""
    if any(isinstance(value, bool) for value in values):
        raise ValueError("YAML reads yes, no, on, off, true and false as truth values; put them in quotes")


def distinct(values: list[Any]) -> None:
    """Raises ValueError unless all values are texts or finite numbers, each there once."""
    seen: set[str] = set()
    no_truths(values)
    for value in values:
        if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"expected texts or numbers, found {value!r}")
        try:
            text = canonical(value)
        except OverflowError:
            raise ValueError(f"{value} is too large a number") from None
        if text in seen:
            raise ValueError(f"the value {value!r} is listed twice")
        seen.add(text)


def one_class_a_value(classes: Any) -> Any:
    """The same; raises ValueError unless every class has a name and a value, and each value one class."""
    no_truths(classes if isinstance(classes, dict) else ())
    if isinstance(classes, dict) and all(isinstance(values, list) for values in classes.values()):
        distinct([value for values in classes.values() for value in values])
        if not all(classes.values()):
            raise ValueError("every class needs at least one value")
    return classes


def check_name(name: str) -> None:
    """Raises ValueError for a class's name that pages and messages do not take."""
    if not name.isprintable() or not 0 < len(name) <= 100:
        raise ValueError(f"a class's name has 1 to 100 characters that can be printed, got {name!r}")


class Classes(Strict):
    """Class by class, in their order, the values that mean it; hospitals that code classes differently list their
    own values under the same names."""

    classes: dict[str, list[str | int | float]] = Field(min_length=2)

    @field_validator("classes", mode="before")
    @classmethod
    def _valid(cls, classes: Any) -> Any:
        return one_class_a_value(classes)

    def index(self) -> dict[str, int]:
        """Canonical value to class index."""
        return {canonical(v): number for number, values in enumerate(self.classes.values()) for v in values}

    def declared(self) -> str:
        """All declared values, for messages."""
        return ", ".join(str(value) for values in self.classes.values() for value in values)


class LabelColumn(Classes):
    """The column to predict."""

    column: str


MOST_LABELS = 255
"""Of a label map, whose voxels are held as bytes: 256 would be the background, and 255 is no class (``UNDECIDED``)."""


class LabelMap(Strict):
    """The values of a label map: 0, 1, 2, ... with their names; ``label_map`` translates what the hospital's files
    hold (say 255) to these values, other values stay. ``annotated``: names of the labels that the files show, where
    these are not all; what is none of them may be background or any other."""

    labels: dict[int, str] = Field(min_length=2)
    label_map: dict[int, int] = {}
    annotated: list[str] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _contiguous(self) -> "LabelMap":
        if sorted(self.labels) != list(range(len(self.labels))):
            raise ValueError(f"label values must be 0, 1, 2, ... without gaps, got {sorted(self.labels)}")
        if len(self.labels) > MOST_LABELS:
            raise ValueError(f"expected at most {MOST_LABELS} labels, got {len(self.labels)}")
        names = list(self.labels.values())
        for name in names:
            check_name(name)
            if names.count(name) > 1:
                raise ValueError(f"the label's name '{name}' is there twice")
        for value, target in self.label_map.items():
            if target not in self.labels:
                raise ValueError(f"label_map: {value} is mapped to {target}, which is not among the labels")
        foreground = self.names()[1:]
        for name in self.annotated or []:
            if name not in foreground or (self.annotated or []).count(name) > 1:
                raise ValueError(
                    f"'annotated' names labels but the first, each once: {', '.join(foreground)}; got {name}"
                )
        return self

    def shown(self) -> tuple[int, ...] | None:
        """Numbers of the labels that are annotated, without the first; None: all."""
        if self.annotated is None:
            return None
        return tuple(value for value, name in sorted(self.labels.items()) if name in self.annotated)

    def refuse_partly(self, where: str) -> None:
        """Refuse a task that would take what is not annotated for background.

        Raises:
            DataError: always, if not all labels are annotated.
        """
        if self.annotated is not None:
            sentence = (
                f"the label maps show {', '.join(self.annotated)} only, and the job's task takes what is not marked "
                "for background; PartlyLabelled does not"
            )
            raise DataError(f"{where}: {sentence}", public=sentence)

    def names(self) -> list[str]:
        """The classes' names in the order of their values."""
        return [self.labels[value] for value in sorted(self.labels)]

    def translate(self, where: str, values: NDArray[Any]) -> NDArray[np.uint8]:
        """A label map as declared values.

        Raises:
            DataError: a value is not declared.
        """
        found = np.unique(values)
        translated = values
        for value in found.tolist():
            target = self.label_map.get(value, value)
            if target not in self.labels:
                raise DataError(f"{where}: label value {_in_full(value)} is not declared; expected {self._expected()}")
            if self.annotated is not None and target and self.labels[target] not in self.annotated:
                raise DataError(
                    f"{where}: label value {value:g} ({self.labels[target]}) is there, and 'annotated' does not name it"
                )
            if target != value:
                translated = np.where(values == value, target, translated)
        return translated.astype(np.uint8)

    def coding(self) -> list[JsonValue]:
        """All that ``translate`` goes by: the declared values, and what becomes which of them."""
        mapped: list[JsonValue] = [[value, target] for value, target in sorted(self.label_map.items())]
        return [*sorted(self.labels), *mapped, *(self.annotated or [])]

    def _expected(self) -> str:
        mapped = f" (or {', '.join(map(str, sorted(self.label_map)))} by label_map)" if self.label_map else ""
        return f"0 to {len(self.labels) - 1}{mapped}"


def _in_full(value: float) -> str:
    """A value as short as it can be told apart from others: of a label map that was scaled, 1.0000001."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


class Problems:
    """What is wrong with data: by default the first problem is raised; ``keep`` collects all of them."""

    def __init__(self, keep: bool = False):
        self.keep = keep
        self.found: list[str] = []

    def add(self, text: str) -> None:
        """One sentence with file, row or key, expected and got."""
        if not self.keep:
            raise DataError(text)
        self.found.append(text)
