# SPDX-License-Identifier: Apache-2.0
"""Images: PNG, JPEG, TIFF and other files with class labels (from a table or from their paths), with masks, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue, field_validator, model_validator

from medpfl.core.errors import DataError, meant
from medpfl.data.cache import How, PreparedCases
from medpfl.data.cells import PLACE, Written, joined, read_cells
from medpfl.data.contract import Case, Dataset, Item, Listing
from medpfl.data.declared import SPLITS, LabelColumn, LabelMap, Problems, canonical, composed, distinct
from medpfl.data.images.new import ImagesPreparation
from medpfl.data.outcome import KEYS, Answer, Outcome, Several, Survival, one_of, read_answer, strata, tensor_of
from medpfl.data.owners import Owners, of_names, of_tables
from medpfl.data.patterns import Found, Patterns, find_files, placeholders
from medpfl.data.pixels import prepare, prepare_mask, read_image, read_mask
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.samples import Budget, Samples, SiteData, empty_like, in_parallel, stores
from medpfl.data.splits import Groups, check_listing, choose
from medpfl.data.subgroups import Described
from medpfl.data.target import Target

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


class ImageTable(Written):
    """A table (CSV, or TSV or Parquet by its suffix) with one row an image.

    ``image``: the column with the file's name, with or without suffix and folders. ``where``: column to values; only
    rows with one of them are used.
    """

    file: str
    image: str
    where: dict[str, list[str | int | float]] = Field(default={})

    @field_validator("where", mode="before")
    @classmethod
    def _values(cls, where: Any) -> Any:
        for column, values in where.items() if isinstance(where, dict) else ():
            if not isinstance(values, list) or not values:
                raise ValueError(f"'{column}' needs a list of at least one value")
            distinct(values)
        return where


class Masks(LabelMap):
    """Label maps as image files, each with its image's name, without suffix, followed by ``suffix``.

    Where their names are made of placeholders alone ("{case}_manual1.gif"), these say whose they are.
    """

    files: Patterns
    suffix: str = ""

    def paired_by(self, shared: Sequence[str]) -> bool:
        """Whether the placeholders that images and masks share say alone which belong together."""
        names = [Path(pattern).name for pattern in self.files]
        alone = all(field in placeholders([name]) for name in names for field in shared)
        return bool(shared) and alone and not self.suffix and not any(set("*?[") & set(name) for name in names)


@dataclass(frozen=True)
class ImageCase(Case):
    """One image. ``label``: class index or other answer, None if there are masks only; ``mask``: its file or None."""

    path: Path
    label: Answer | None
    mask: Path | None


@dataclass(frozen=True)
class _Row:
    """An image with what is known about it. ``where``: the table's row, or the image itself."""

    image: Found
    where: str
    cells: dict[str, str]


class Images(Described, Dataset):
    """Image files, in grey or colour as ``channels`` says.

    A column is one of the table's, or a placeholder of ``files``: ``"{split}/{dx}/*.png"`` has the columns ``split``
    and ``dx`` (which then go before the table's). With a table, its rows say which images are used; others are not
    looked at. A mask's placeholders that the images have too must agree. What is to be predicted is ``masks``, one of
    ``label``, ``several``, ``value`` and ``survival`` as in tables, or both.
    """

    form: ClassVar[str] = "images"
    targets: ClassVar[tuple[Target, ...]] = tuple(Target)
    preparation: ClassVar[type[Preparation]] = ImagesPreparation
    agreed: ClassVar[tuple[str, ...]] = ("channels", "masks.labels")

    kind: Literal["images"]
    files: Patterns
    channels: Literal[1, 3] = 3
    table: ImageTable | None = None
    label: LabelColumn | None = None
    several: Several | None = None
    value: str | None = None
    survival: Survival | None = None
    masks: Masks | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Images:
        answers = {"label": self.label, "several": self.several, "value": self.value, "survival": self.survival}
        if any(answers.values()):
            one_of(**answers)
        elif self.masks is None:
            raise ValueError(f"expected 'masks' or one of {', '.join(answers)}, or both")
        if self.split.stratify and self.label is None and self.survival is None:
            raise ValueError("'stratify' needs 'label'; masks have no one class to stratify by")
        for column in self._columns():
            if self.table is None and column not in placeholders(self.files):
                raise ValueError(
                    f"there is no column '{column}': no 'table' is declared, and 'files' has no {{{column}}} in it"
                    f"{meant(column, placeholders(self.files))}"
                )
        return self

    @property
    def answered(self) -> Target | None:
        """What of each image is declared beside its mask."""
        declared = {Target.CLASS: self.label, Target.LABELS: self.several, Target.VALUE: self.value}
        return next((key for key, one in {**declared, Target.SURVIVAL: self.survival}.items() if one), None)

    @property
    def target(self) -> Target:
        return self.answered or Target.MASK

    def class_names(self) -> list[str]:
        """The label's, else the masks'."""
        return self._names(self.target)

    def _names(self, target: Target) -> list[str]:
        if target is Target.MASK:
            return self._masks().names()
        if self.label:
            return list(self.label.classes)
        return self.several.names() if self.several else []

    def cases(self, problems: Problems) -> Listing:
        """Raises DataError if the table itself cannot be read, whatever ``problems`` keeps."""
        found = self._found(problems)
        rows = self._rows(found, problems)
        masks = self._find_masks(rows, problems)
        cases, parts, groups = [], [], Groups()
        for row in rows:
            if (case := self._case(row, masks, groups, problems)) is not None:
                cases.append(case)
                parts.append(row.cells.get(self.split.column or "", ""))
        source = str(self._folder / (self.table.file if self.table else self.files[0]))
        chosen = choose(
            self.split,
            [case.where for case in cases],
            problems,
            source=source,
            groups=[case.group for case in cases] if self.split.group or self.split.file else None,
            classes=strata([case.label for case in cases if case.label is not None], self.answered or Target.MASK),
            named=parts,
        )
        listing: Listing = {split: [cases[index] for index in chosen[split]] for split in SPLITS}
        check_listing(listing, source, problems)
        return listing

    def owners(self) -> Owners:
        yield from of_names(self._folder, self.files)
        if self.table:
            yield from of_tables([self._folder / self.table.file], self.table.of_cases())

    def read(self, case: ImageCase) -> Item:
        """C x H x W image (uint8 or uint16); its class or the like, or its mask (H x W) where only masks are declared.
        A declared mask is read and checked in any case."""
        image = read_image(case.path, self.channels)
        mask = prepare_mask(self._mask(case, image.shape[1:]), image.shape[1:]).numpy() if self.masks else None
        target = mask if case.label is None else case.label
        assert target is not None
        return Item(image, target)

    def described(self) -> dict[str, dict[str, str]]:
        problems = Problems(keep=True)
        rows = self._rows(self._found(problems), problems)
        return {column: {row.image.name: row.cells[column] for row in rows} for column in self.described_by}

    def load(self, spec: Spec) -> SiteData:
        """All images as network inputs of ``spec.size`` (height, width), or whole for patches of this size, with their
        classes or masks.

        Raises:
            DataError: with the file, expected and got; or the dataset declares no such target.
        """
        masked, size = spec.target is Target.MASK, None if spec.whole else spec.plane()
        if (masked and self.masks is None) or (not masked and spec.target is not self.answered):
            key = KEYS.get(spec.target, "masks")
            sentence = f"the job's task needs images with '{key}', which the dataset does not declare"
            raise DataError(f"{self._folder / self.files[0]}: {sentence}", public=sentence)
        if masked and not spec.partly:
            self._masks().refuse_partly(self.files[0])
        shown = self._masks().shown() if masked else None
        names = self._names(spec.target)
        budget = Budget(self._storage, self._folder)
        cache = PreparedCases(self._storage, self._folder)
        read = partial(self._cached, size=size, masked=masked, cache=cache)
        splits: dict[str, Samples] = {}
        listing = self.cases(Problems())
        for split, cases in listing.items():
            if not cases:
                splits[split] = empty_like(splits["train"])
                continue
            inputs, masks = stores(spec, budget)
            for image, mask in in_parallel(read, cases):
                inputs.append(image if spec.whole else image[None])
                if mask is not None:
                    masks.append(mask if spec.whole else mask[None])
            answers = [case.label for case in cases if case.label is not None]
            targets = masks.finish() if masked else tensor_of(answers, spec.target)
            files = [case.name for case in cases]
            owners, case_of = [case.group for case in cases], np.arange(len(cases))
            splits[split] = Samples(inputs.finish(), targets, case_of, files, len(names), shown, owners)
        return SiteData(splits, names, ImagesPreparation(channels=self.channels))

    def _cached(
        self, case: ImageCase, size: tuple[int, int] | None, masked: bool, cache: PreparedCases
    ) -> tuple[Tensor, Tensor | None]:
        """``_prepared``, from the cache if it is there."""
        how: How = {
            "kind": f"{type(self).__module__}.{type(self).__qualname__}",
            "size": list(size or ()),
            "channels": self.channels,
            "labels": self._masks().coding() if masked else [],
        }
        sources = [case.path, *([case.mask] if masked and case.mask else [])]
        kept = cache.get(sources, how, partial(self._prepared, case, size, masked), [type(self)])
        return kept["image"], kept.get("mask")

    def _prepared(self, case: ImageCase, size: tuple[int, int] | None, masked: bool) -> dict[str, Tensor]:
        image = read_image(case.path, self.channels)
        height, width = size or image.shape[1:]
        masks = {"mask": prepare_mask(self._mask(case, image.shape[1:]), (height, width))} if masked else {}
        return {"image": prepare(image, (height, width)), **masks}

    def _mask(self, case: ImageCase, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """The mask, H x W in declared values; its resolution may be another than its image's, its proportions not."""
        assert case.mask is not None
        values = read_mask(case.mask)
        finer = values.shape[0] / shape[0]
        if abs(values.shape[1] - finer * shape[1]) > max(1, finer):
            raise DataError(
                f"{case.mask}: expected the proportions of its image {case.path.name}, {shape[0]} x {shape[1]} pixels "
                f"(height x width), got {values.shape[0]} x {values.shape[1]}"
            )
        return self._masks().translate(str(case.mask), values)

    def _masks(self) -> Masks:
        assert self.masks is not None
        return self.masks

    def _columns(self) -> list[str]:
        """The columns that are used, each once."""
        answers = [self.label.column if self.label else self.value, *(self._outcome.used() if self._outcome else [])]
        others = (self.split.group, self.split.column, *self.described_by)
        return list(dict.fromkeys(one for one in (*answers, *others) if one))

    def coding_of_masks(self) -> list[JsonValue]:
        return self.masks.coding() if self.masks else []

    @property
    def _outcome(self) -> Outcome | None:
        return self.several or self.survival

    def _found(self, problems: Problems) -> list[Found]:
        """The files that may be images: a mask that lies beside its image, under a name with the suffix, is none."""
        found = find_files(self._folder, self.files, problems)
        if self.masks is None or not self.masks.suffix:
            return found
        beside = find_files(self._folder, self.masks.files, Problems(keep=True))
        masks = {mask.name for mask in beside if mask.path.stem.endswith(self.masks.suffix)}
        return [image for image in found if image.name not in masks] or found

    def _rows(self, found: list[Found], problems: Problems) -> list[_Row]:
        """The images that are used: all, or those the table names."""
        if self.table is None:
            return [_Row(image, image.name, image.fields) for image in found]
        if not found:
            return []  # which was told, and no row of the table would have an image
        path = self._folder / self.table.file
        known = placeholders(self.files)
        wanted = [self.table.image, *(column for column in self._columns() if column not in known)]
        where = {column: {canonical(value) for value in values} for column, values in self.table.where.items()}
        numbers = [column for column in (self.value, self.survival.time if self.survival else None) if column]
        form = self.table.of_cases()
        frames = read_cells(path, path.name, form, problems, wanted, where=where, as_texts=numbers)
        frame = joined(frames).fillna("")
        if frame.empty:
            problems.add(f"{path}: no row has {' and '.join(f'{c} in {v}' for c, v in self.table.where.items())}")
        index = _by_name(found)
        rows: dict[str, _Row] = {}
        for cells in _records(frame):
            place, name = f"{path.name}:{cells.pop(PLACE)}", cells[self.table.image]
            images = _named(index, name)
            if len(images) != 1:
                problem = f"names several: {', '.join(image.name for image in images)}" if images else "does not exist"
                problems.add(f"{place}: the image '{name}' {problem} (files: {', '.join(self.files)})")
            elif images[0].name in rows:
                problems.add(f"{place}: the image '{name}' has another row, {rows[images[0].name].where}")
            else:
                rows[images[0].name] = _Row(images[0], place, {**cells, **images[0].fields})
        return list(rows.values())

    def _find_masks(self, rows: Sequence[_Row], problems: Problems) -> dict[str, Path]:
        """Image's name to its mask; the images that have none, or no one, are told of."""
        if self.masks is None:
            return {}
        shared = sorted(placeholders(self.files) & placeholders(self.masks.files))
        named = not self.masks.paired_by(shared)
        index: dict[tuple[str, ...], list[Found]] = {}
        for mask in find_files(self._folder, self.masks.files, problems):
            if mask.path.stem.endswith(self.masks.suffix):
                stem = mask.path.stem.removesuffix(self.masks.suffix) if named else ""
                index.setdefault((stem, *(mask.fields[field] for field in shared)), []).append(mask)
        masks: dict[str, Path] = {}
        owner: dict[str, str] = {}
        for row in rows:
            image = row.image
            stem = image.path.stem if named else ""
            fits = index.get((stem, *(image.fields[field] for field in shared)), [])
            if len(fits) != 1:
                problem = f"several masks: {', '.join(mask.name for mask in fits)}" if fits else "no mask"
                wanted = f"{stem}{self.masks.suffix}" if named else ", ".join(f"{k} {image.fields[k]}" for k in shared)
                problems.add(
                    f"{row.where}: the image {image.name} has {problem}; expected one {wanted} among "
                    f"{', '.join(self.masks.files)}"
                )
            elif fits[0].name in owner:
                problems.add(f"{row.where}: the mask {fits[0].name} fits {image.name} and {owner[fits[0].name]}")
            else:
                owner[fits[0].name] = image.name
                masks[image.name] = fits[0].path
        return masks

    def _case(self, row: _Row, masks: dict[str, Path], groups: Groups, problems: Problems) -> ImageCase | None:
        if self.masks and row.image.name not in masks:
            return None
        answer = None
        if self.answered:
            try:
                answer = read_answer(row.cells, self.label, self.value, self._outcome)
            except ValueError as error:
                problems.add(f"{row.where}: {error}")
                return None
        group = groups.named(row.cells[self.split.group]) if self.split.group else row.image.name
        if not group:
            problems.add(f"{row.where}: column '{self.split.group}' is empty; every image needs a group")
            return None
        return ImageCase(row.image.name, group, row.where, row.image.path, answer, masks.get(row.image.name))


def _records(frame: pd.DataFrame) -> Iterator[dict[str, str]]:
    columns = list(frame.columns)
    for row in frame.itertuples(index=False, name=None):
        yield dict(zip(columns, row, strict=True))


def _by_name(found: Sequence[Found]) -> dict[str, list[Found]]:
    index: dict[str, list[Found]] = {}
    for image in found:
        for name in {composed(image.path.name), composed(image.path.stem)}:
            index.setdefault(name, []).append(image)
    return index


def _named(index: dict[str, list[Found]], name: str) -> list[Found]:
    """The images that a cell means: by name or stem, and by the folders that stand before it."""
    wanted = Path(composed(name))
    folders = wanted.parent.parts
    candidates = index.get(wanted.name, [])
    return [image for image in candidates if not folders or _folders(image)[-len(folders) :] == folders]


def _folders(image: Found) -> tuple[str, ...]:
    return tuple(map(composed, image.path.parent.parts))
