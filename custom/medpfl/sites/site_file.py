# SPDX-License-Identifier: Apache-2.0
"""The site file: a YAML file, owned by the hospital, that declares the datasets jobs may use by name.

site: hospital-a
datasets:
  organ:                              # the name that jobs use
    kind: volumes
    datalist: datalist.json           # relative to the site file
    labels: {0: background, 1: organ}
  heart:
    kind: table
    files: [processed.cleveland.data]
    columns: [age, sex, cp, num]      # when the file has no header line
    features: {age: number, sex: number, cp: [1, 2, 3, 4]}
    label: {column: num, classes: {absent: [0], present: [1, 2, 3, 4]}}
    split: {seed: 43, fractions: {train: 0.5, validation: 0.16, test: 0.34}, stratify: true}
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from medpfl.core.errors import SiteFileError

ENVIRONMENT_VARIABLE = "MEDPFL_SITE_FILE"
SPLITS = ("train", "validation", "test")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SplitRule(_Strict):
    """How a dataset is cut into train, validation and test when its list does not say so itself.

    ``group``: the column (or datalist field) whose equal values must stay together, a patient identifier usually.
    ``stratify``: keep the class proportions (only without ``group``).
    """

    seed: int = 0
    fractions: dict[Literal["train", "validation", "test"], float] = {"train": 0.6, "validation": 0.2, "test": 0.2}
    group: str | None = None
    stratify: bool = False

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
        return self


class Volumes(_Strict):
    """Images with label maps, listed in MONAI's Decathlon datalist format (NIfTI).

    The datalist's ``training``, ``validation`` and ``test`` lists are used as they are; if it has only ``training``,
    ``split`` cuts it. Its items are ``{"image": path, "label": path, ...}``, paths relative to the datalist.
    """

    kind: Literal["volumes"]
    datalist: str
    labels: dict[int, str] = Field(min_length=2)
    split: SplitRule = SplitRule(group="patient")
    _folder: Path = PrivateAttr(default=Path())

    @field_validator("labels")
    @classmethod
    def _contiguous(cls, labels: dict[int, str]) -> dict[int, str]:
        if sorted(labels) != list(range(len(labels))):
            raise ValueError(f"label values must be 0, 1, 2, ... without gaps, got {sorted(labels)}")
        return labels

    @model_validator(mode="after")
    def _no_strata(self) -> "Volumes":
        if self.split.stratify:
            raise ValueError("'stratify' is for tables; volumes have no class to stratify by")
        return self


def canonical(value: str | float) -> str:
    """One text for each value of a column: "3", "3.0" and 3 are the same."""
    try:
        return repr(float(value))
    except ValueError:
        return str(value)


def _feature(value: Any) -> Any:
    """What a feature is declared as; one sentence where pydantic would give one per member of the union."""
    if value == "number":
        return value
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError("expected 'number' or a list of at least 2 categories")
    _distinct(value)
    return value


def _distinct(values: list[Any]) -> None:
    seen: set[str] = set()
    for value in values:
        if isinstance(value, bool):
            raise ValueError("YAML reads yes, no, on, off, true and false as truth values; put them in quotes")
        if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"expected texts or numbers, found {value!r}")
        try:
            text = canonical(value)
        except OverflowError:
            raise ValueError(f"{value} is too large a number") from None
        if text in seen:
            raise ValueError(f"the value {value!r} is listed twice")
        seen.add(text)


class LabelColumn(_Strict):
    """The column to predict and, class by class in their order, the values that mean it."""

    column: str
    classes: dict[str, list[str | int | float]] = Field(min_length=2)

    @field_validator("classes", mode="before")
    @classmethod
    def _one_class_a_value(cls, classes: Any) -> Any:
        if isinstance(classes, dict) and all(isinstance(values, list) for values in classes.values()):
            _distinct([value for values in classes.values() for value in values])
            if not all(classes.values()):
                raise ValueError("every class needs at least one value")
        return classes


class Table(_Strict):
    """One row a patient (or visit), read from CSV-like files.

    ``features`` maps a column to ``number`` or to the list of its categories (coded one-hot without the first).
    ``missing``: cell texts that mean "not known"; ``missing_rows``: what to do with rows that lack a used value.
    """

    kind: Literal["table"]
    files: list[str] = Field(min_length=1)
    separator: str = Field(default=",", min_length=1, max_length=1)
    columns: list[str] | None = None
    missing: list[str] = ["", "?", "NA"]
    missing_rows: Literal["drop", "refuse"] = "refuse"
    features: dict[str, Annotated[Literal["number"] | list[str | int | float], BeforeValidator(_feature)]] = Field(
        min_length=1
    )
    label: LabelColumn
    split: SplitRule = SplitRule(stratify=True)
    _folder: Path = PrivateAttr(default=Path())

    @field_validator("separator")
    @classmethod
    def _separates(cls, separator: str) -> str:
        if separator in '\0\r\n"':
            raise ValueError("expected a comma, semicolon, tab or the like")
        return separator

    @field_validator("columns")
    @classmethod
    def _named_once(cls, columns: list[str] | None) -> list[str] | None:
        for column in columns or []:
            if columns and columns.count(column) > 1:
                raise ValueError(f"the column '{column}' is listed twice")
        return columns

    @model_validator(mode="after")
    def _label_is_no_feature(self) -> "Table":
        if self.label.column in self.features:
            raise ValueError(f"the column to predict, '{self.label.column}', is also a feature")
        return self


Dataset = Annotated[Volumes | Table, Field(discriminator="kind")]


class SiteFile(_Strict):
    """A hospital's declaration of its datasets."""

    site: str | None = None
    datasets: dict[str, Dataset] = Field(min_length=1)
    _path: Path = PrivateAttr(default=Path())

    def dataset(self, name: str, kind: type[Volumes] | type[Table]) -> Volumes | Table:
        """The declared dataset ``name``, of the kind the task needs.

        Raises:
            SiteFileError: it is not declared, or is of another kind.
        """
        if name not in self.datasets:
            raise SiteFileError(
                f"{self._path}: the job asks for dataset '{name}', which this hospital does not declare; "
                f"declared: {', '.join(sorted(self.datasets))}",
                public=f"dataset '{name}' is not declared at this hospital",
            )
        dataset = self.datasets[name]
        if not isinstance(dataset, kind):
            wanted = kind.model_fields["kind"].annotation.__args__[0]  # type: ignore[union-attr]
            raise SiteFileError(
                f"{self._path}: dataset '{name}' is of kind '{dataset.kind}', the job's task needs '{wanted}'",
                public=f"dataset '{name}' is of another kind than the job's task needs",
            )
        return dataset


def load_site_file(path: Path, site: str | None = None) -> SiteFile:
    """Read and validate a site file.

    Args:
        path: the file, or a folder that holds ``<site>.yaml``.
        site: the hospital's name in the federation; a file that names another hospital is refused.

    Raises:
        SiteFileError: one sentence with the file, the key, expected and got.
    """
    if path.is_dir():
        if not site:
            raise SiteFileError(f"{path} is a folder; name the site file in it")
        path = path / f"{site}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SiteFileError(f"cannot read the site file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or a date such as 2020-13-01
        where = f" (line {mark.line + 1})" if (mark := getattr(error, "problem_mark", None)) else ""
        raise SiteFileError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict):
        raise SiteFileError(f"{path}: expected a mapping with the key 'datasets', got {type(content).__name__}")
    try:
        parsed = SiteFile.model_validate(content)
    except ValidationError as error:
        raise SiteFileError(f"{path}: {_first_problem(error)}") from error
    if site and parsed.site and parsed.site != site:
        raise SiteFileError(f"{path}: it is the site file of '{parsed.site}', but this hospital is '{site}'")
    parsed._path = path
    for dataset in parsed.datasets.values():
        dataset._folder = path.parent
    return parsed


def find_site_file(site: str, scope: dict[str, object] | None, kit_local: Path | None) -> SiteFile:
    """Find a hospital's site file: its privacy scope's property, else the environment variable, else the kit's
    ``local/`` folder. A job has no say in it.

    Args:
        site: the hospital's name in the federation.
        scope: the privacy scope's properties; ``site_file`` names the file.
        kit_local: the startup kit's ``local`` folder, where ``site.yaml`` or ``<site>.yaml`` may lie.

    Raises:
        SiteFileError: none was found (says where it was looked for), or it is not valid.
    """
    if scope and scope.get("site_file"):
        return load_site_file(Path(str(scope["site_file"])), site)
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return load_site_file(Path(os.environ[ENVIRONMENT_VARIABLE]), site)
    candidates = [kit_local / f"{site}.yaml", kit_local / "site.yaml"] if kit_local else []
    for candidate in candidates:
        if candidate.is_file():
            return load_site_file(candidate, site)
    raise SiteFileError(
        f"no site file for '{site}': the privacy scope has no 'site_file', {ENVIRONMENT_VARIABLE} is not set, and "
        f"there is no {' or '.join(str(c) for c in candidates) or 'startup kit folder'}",
        public="this hospital has no site file",
    )


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    # pydantic puts the tag of the union of datasets third; it is not a key of the file.
    loc = problem["loc"][:2] + problem["loc"][3:] if problem["loc"][:1] == ("datasets",) else problem["loc"]
    place = ".".join(str(p) for p in loc if p != "[key]") or "the file"
    got = problem.get("input")
    shown = "" if isinstance(got, dict | BaseModel) or problem["type"] == "missing" else f", got {got!r}"
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{place}'"
    if problem["type"] == "missing":
        return f"key '{place}' is missing"
    if problem["type"] == "union_tag_not_found":
        return f"key '{place}.kind' is missing; expected 'volumes' or 'table'"
    if problem["type"] == "union_tag_invalid":
        return f"'{place}.kind': expected 'volumes' or 'table', got {problem['ctx']['tag']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"'{place}': {message[0].lower()}{message[1:]}{shown}"
