# SPDX-License-Identifier: Apache-2.0
"""Arrays: .npz files with one row a case, in MedMNIST's format or with keys of their own."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, field_validator, model_validator

from medpfl.core.errors import DataError
from medpfl.data.arrays.npz import Npz
from medpfl.data.arrays.prepare import (
    MEDMNIST,
    ArraysPreparation,
    Layout,
    channels_first,
    check_finite,
    fitted_range,
    fixed_range,
    layout_of,
    picked,
    prepare,
)
from medpfl.data.contract import Case, Dataset, Item, Listing
from medpfl.data.declared import SPLITS, Classes, Problems, SplitRule, Strict, canonical, one_class_a_value
from medpfl.data.outcome import KEYS, Answer, Survival, Value, empty, one_of, read_answer, strata, tensor_of
from medpfl.data.owners import Owners
from medpfl.data.patients import PATIENT
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.rows import Rows
from medpfl.data.samples import Budget, Samples, SiteData, Store, empty_like
from medpfl.data.splits import Groups, check_listing, choose
from medpfl.data.target import Target


class Lists(Strict):
    """Splits as lists of rows in a JSON file, a list of lists; ``train``, ``test`` and ``validation`` say which of
    them (from 0). Rows count through the file's train, val and test arrays, in this order."""

    file: str
    train: int = Field(ge=0)
    test: int = Field(ge=0)
    validation: int | None = Field(default=None, ge=0)


class ArraySplit(SplitRule):
    """``column`` and ``group`` name arrays of the file; ``lists`` stands alone."""

    lists: Lists | None = None

    @model_validator(mode="after")
    def _alone(self) -> "ArraySplit":
        if self.lists and len(self.model_fields_set) > 1:
            other = sorted(self.model_fields_set - {"lists"})[0]
            raise ValueError(f"'lists' names the splits, so '{other}' has nothing to cut; leave it out")
        return self


@dataclass(frozen=True)
class ArrayCase(Case):
    """One row. ``key``: its array; ``row``: its index there; ``label``: class index or other answer."""

    key: str
    row: int
    label: Answer


class Arrays(Dataset):
    """Images (or volumes) and labels of an .npz file, row by row.

    Without ``inputs`` and ``labels`` the file is MedMNIST's: train_images, train_labels, val_..., test_... What is to
    be predicted is one of ``classes``: the values of ``labels``, N; ``several``: names of the columns of ``labels``, N
    x C zeros and ones (NaN: not known); ``value``: an array of N numbers; ``survival``: arrays of N times and N events.
    ``layout``: what the axes are (N rows, C channels, D H W), where the shape does not tell.
    """

    form: ClassVar[str] = "images"
    targets: ClassVar[tuple[Target, ...]] = (Target.CLASS, Target.LABELS, Target.VALUE, Target.SURVIVAL)
    preparation: ClassVar[type[Preparation]] = ArraysPreparation

    kind: Literal["arrays"]
    file: str
    inputs: str | None = None
    labels: str | None = None
    classes: dict[str, list[Value]] | None = Field(default=None, min_length=2)
    several: list[str] | None = Field(default=None, min_length=2)
    value: str | None = None
    survival: Survival | None = None
    layout: Layout | None = None
    split: ArraySplit = ArraySplit()
    _stored: dict[str, tuple[str, Rows]] = PrivateAttr(default_factory=dict)
    _reading: Any = PrivateAttr(default_factory=Lock)

    @model_validator(mode="after")
    def _keys(self) -> "Arrays":
        self.split.need_group()
        one_of(classes=self.classes, several=self.several, value=self.value, survival=self.survival)
        if self.several and len(set(self.several)) < len(self.several):
            raise ValueError("'several' names a label twice")
        if self.value or self.survival:
            if self.inputs is None or self.labels is not None:
                raise ValueError("'value' and 'survival' name arrays beside 'inputs', and there are no 'labels' then")
        elif (self.inputs is None) != (self.labels is None):
            raise ValueError("expected 'inputs' and 'labels', or neither for a file in MedMNIST's format")
        if self.inputs is None and self.split.model_fields_set - {"lists"}:
            raise ValueError("a file in MedMNIST's format names its splits; 'split' may only have 'lists'")
        return self

    @field_validator("classes", mode="before")
    @classmethod
    def _valid(cls, classes: Any) -> Any:
        return one_class_a_value(classes)

    def class_names(self) -> list[str]:
        return list(self.classes or self.several or [])

    @property
    def target(self) -> Target:
        """What its answers are."""
        if self.value:
            return Target.VALUE
        return Target.SURVIVAL if self.survival else Target.LABELS if self.several else Target.CLASS

    def cases(self, problems: Problems) -> Listing:
        """Raises DataError if the file or its labels cannot be read, whatever ``problems`` keeps."""
        file = Npz(self._folder / self.file)
        rows = [(split, self._rows_of(file, *keys, problems)) for split, keys in self._parts(file).items()]
        everything = [case for _, part in rows for case in part]
        if self.split.lists:
            listing = self._listed(self.split.lists, everything, problems)
        elif self.inputs is None:
            found = dict(rows)
            listing = {split: [*_good(found.get(split, []))] for split in SPLITS}
        else:
            listing = self._cut(file, everything, problems)
        check_listing(listing, str(file.path), problems)
        return listing

    def owners(self) -> Owners:
        file = Npz(self._folder / self.file)
        rows = file.header(self.inputs)[0][0] if self.inputs else -1
        for key in filter(PATIENT.fullmatch, file.keys):
            if file.header(key)[0] in ((rows,), (rows, 1)):
                yield key, [str(value) for value in file.array(key).ravel().tolist()]

    def read(self, case: ArrayCase) -> Item:
        """C x H x W (or C x D x H x W) as stored, and the class."""
        import torch

        path = self._folder / self.file
        with self._reading:
            if case.key not in self._stored:
                file = Npz(path)
                layout = layout_of(file, case.key, self.layout)
                store = Store(Budget(self._storage, self._folder))
                for block in file.blocks(case.key):
                    # A copy: torch does not take memory that cannot be written, or numbers of the other byte order.
                    store.append(torch.from_numpy(block.astype(block.dtype.newbyteorder("="))))
                self._stored[case.key] = (layout, store.finish())
        layout, rows = self._stored[case.key]
        image = channels_first(rows[case.row : case.row + 1].numpy(), layout)
        check_finite(f"{path}: {case.key}", image, [case.row])
        return Item(image[0], case.label)

    def load(self, spec: Spec) -> SiteData:
        """All rows as network inputs of ``spec.size``; truth values, uint8 and uint16 are scaled by their type's
        maximum, other numbers standardised channel by channel with the training part's mean and deviation.

        Raises:
            DataError: with the file, the array and the row, expected and got.
        """
        if spec.target is not self.target:
            key = KEYS[spec.target].replace("label", "classes")
            sentence = f"the job's task learns {spec.target.told}: it needs arrays with '{key}', which is not declared"
            raise DataError(f"{self._folder / self.file}: {sentence}", public=sentence)
        file = Npz(self._folder / self.file)
        listing = self.cases(Problems())
        layouts = {key: layout_of(file, key, self.layout) for key, _ in self._parts(file).values()}
        dtype, channels = _one_form(file, layouts)

        def rows(key: str, cases: Sequence[Any]) -> Iterator[tuple[NDArray[Any], list[int]]]:
            return picked(file, key, layouts[key], [case.row for case in cases if case.key == key])

        train = (images for key in layouts for images, _ in rows(key, listing["train"]))
        ranges = fixed_range(dtype, channels) or fitted_range(train)
        budget = Budget(self._storage, self._folder)
        splits: dict[str, Samples] = {}
        for split, cases in listing.items():
            if not cases:
                splits[split] = empty_like(splits["train"])
                continue
            inputs = Store(budget)
            for key in layouts:
                for images, _ in rows(key, cases):
                    inputs.append(prepare(images, spec.size, ranges))
            targets = tensor_of([case.label for case in cases], self.target)
            names = [case.name for case in cases]
            owners, classes = [case.group for case in cases], len(self.class_names())
            splits[split] = Samples(inputs.finish(), targets, np.arange(len(cases)), names, classes, owners=owners)
        made = ArraysPreparation(
            inputs=self.inputs, layout=self.layout, dtype=dtype.name, mean=ranges["mean"], scale=ranges["scale"]
        )
        return SiteData(splits, self.class_names(), made)

    def _parts(self, file: Npz) -> dict[str, tuple[str, str]]:
        """Part of the file to the keys of its inputs and labels."""
        if self.inputs:
            return {"all": (self.inputs, self.labels or "")}
        prefixes = {split: prefix for split, prefix in MEDMNIST.items() if f"{prefix}_images" in file.keys}
        if "train" not in prefixes:
            raise DataError(
                f"{file.path}: expected MedMNIST's arrays train_images, train_labels, ... (or declare 'inputs' and "
                f"'labels'); the file has: {', '.join(file.keys)}"
            )
        return {split: (f"{prefix}_images", f"{prefix}_labels") for split, prefix in prefixes.items()}

    def _rows_of(self, file: Npz, inputs: str, labels: str, problems: Problems) -> list[ArrayCase | None]:
        """A case for each row, None where its answer cannot be used."""
        rows = list[ArrayCase | None]()
        for row, answer in enumerate(self._answers(file, labels, file.header(inputs)[0][0])):
            if isinstance(answer, str):
                problems.add(f"{file.path}: {answer}")
                rows.append(None)
            else:
                name = f"{inputs}[{row}]"
                rows.append(ArrayCase(name, name, f"{file.path}: {name}", inputs, row, answer))
        return rows

    def _answers(self, file: Npz, labels: str, count: int) -> Iterator[Answer | str]:
        """The answer to each row, or what is wrong with it."""
        if self.several:
            yield from _several(file, labels, count, len(self.several))
        elif self.classes:
            classes = Classes(classes=self.classes)
            index = classes.index()
            for row, value in enumerate(_column(file, labels, count).tolist()):
                wrong = f"{labels}[{row}]: {value!r} is not among the values ({classes.declared()})"
                yield index.get(canonical(value), wrong)
        else:
            keys = self.survival.used() if self.survival else [str(self.value)]
            columns = {key: _column(file, key, count).tolist() for key in keys}
            for row in range(count):
                try:
                    cells = {key: values[row] for key, values in columns.items()}
                    yield read_answer(cells, None, self.value, self.survival)
                except ValueError as error:
                    yield f"row {row}: {error}"

    def _cut(self, file: Npz, rows: list[ArrayCase | None], problems: Problems) -> Listing:
        cases, texts = _good(rows), list[str]()
        if self.split.group:
            groups, column = Groups(), _column(file, self.split.group, len(rows)).tolist()
            for case in cases:
                if empty(column[case.row]):
                    problems.add(f"{case.where}: array '{self.split.group}' has no value; every row needs a group")
            known = [case for case in cases if not empty(column[case.row])]
            cases = [replace(case, group=groups.named(str(column[case.row]))) for case in known]
        if self.split.column:
            column = _column(file, self.split.column, len(rows)).tolist()
            texts = [str(column[case.row]) for case in cases]
        chosen = choose(
            self.split,
            [case.where for case in cases],
            problems,
            source=str(file.path),
            groups=[case.group for case in cases] if self.split.group else None,
            classes=strata([case.label for case in cases], self.target),
            named=texts,
        )
        return {split: [cases[index] for index in chosen[split]] for split in SPLITS}

    def _listed(self, lists: Lists, rows: list[ArrayCase | None], problems: Problems) -> Listing:
        path = self._folder / lists.file
        content = _read_lists(path)
        listing: dict[str, list[ArrayCase]] = {split: [] for split in SPLITS}
        for split in SPLITS:
            number = getattr(lists, split)
            if number is None:
                continue
            if number >= len(content):
                problems.add(f"{path}: there is no list {number} for {split}; the file has {len(content)}")
                continue
            wrong = [index for index in content[number] if not 0 <= index < len(rows)]
            if wrong:
                problems.add(f"{path}: list {number}: there is no row {wrong[0]}; {self.file} has {len(rows)} rows")
                continue
            if len(set(content[number])) < len(content[number]):
                problems.add(f"{path}: list {number}: a row is in it twice")
            listing[split] = [*_good([rows[index] for index in sorted(set(content[number]))])]
        return listing


def _good(rows: list[ArrayCase | None]) -> list[ArrayCase]:
    return [case for case in rows if case]


def _column(file: Npz, key: str, count: int) -> NDArray[Any]:
    """One value a row: N, or N x 1 as MedMNIST has it."""
    shape, dtype = file.header(key)
    if shape not in ((count,), (count, 1)):
        raise DataError(
            f"{file.path}: array '{key}' has the shape {shape}; expected one value for each of {count} rows"
        )
    if dtype.kind not in "biufU":
        raise DataError(f"{file.path}: array '{key}' is of type {dtype}; expected numbers or texts")
    return file.array(key).reshape(count)


def _several(file: Npz, key: str, count: int, labels: int) -> Iterator[tuple[float, ...] | str]:
    """Of each row whether it has each label, or what is wrong with it."""
    shape, dtype = file.header(key)
    if shape != (count, labels) or dtype.kind not in "biuf":
        raise DataError(
            f"{file.path}: array '{key}' has the shape {shape} and type {dtype}; expected {count} x {labels} zeros and "
            "ones, a column for each of the labels that 'several' names"
        )
    values = file.array(key).astype(np.float64)
    for row, found in enumerate(values.tolist()):
        wrong = [one for one in found if one not in (0, 1) and one == one]
        yield f"{key}[{row}]: expected 0, 1 or NaN (not known), got {wrong[0]:g}" if wrong else tuple(found)


def _one_form(file: Npz, layouts: dict[str, str]) -> tuple[np.dtype[Any], int]:
    """Type and number of channels, which all input arrays must share."""
    forms = {}
    for key, layout in layouts.items():
        shape, dtype = file.header(key)
        forms[key] = (dtype, shape[layout.index("C")] if "C" in layout else 1)
    first, form = next(iter(forms.items()))
    for key, other in forms.items():
        if other != form:
            raise DataError(
                f"{file.path}: array '{key}' is {other[0]} with {other[1]} channels, "
                f"'{first}' is {form[0]} with {form[1]}"
            )
    return form


def _read_lists(path: Path) -> list[list[int]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, list) or not all(
        isinstance(part, list) and all(type(index) is int for index in part) for part in content
    ):
        raise DataError(f"{path}: expected a list of lists of row numbers")
    return content
