# SPDX-License-Identifier: Apache-2.0
"""Rows to predict: how the training rows were prepared, and rows that are prepared alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from medpfl.core.errors import DataError
from medpfl.data.cells import PLACE, Cells, joined, read_cells
from medpfl.data.declared import Problems
from medpfl.data.meaning import described
from medpfl.data.preparation import NewCase, Preparation, Spec
from medpfl.data.samples import to_tensor
from medpfl.data.table.coding import ROW, Feature, coded, filled, numeric


class TablePreparation(Preparation):
    """How tables are written (``cells``) and declared, the values that are imputed, and the mean and scale of each
    coded feature. ``label``: the column to predict; where there are several, the first of ``answers``."""

    form: ClassVar[str] = "rows"
    kind: Literal["table"] = "table"
    cells: Cells
    features: dict[str, Feature]
    units: dict[str, str] = Field(default={})
    label: str
    answers: list[str] = Field(default=[], exclude_if=lambda found: not found)
    imputed: dict[str, str | int | float]
    mean: list[float]
    scale: list[float]

    @model_validator(mode="after")
    def _of_each_coded_feature(self) -> Self:
        columns = sum(1 if kind == "number" else len(kind) - 1 for kind in self.features.values())
        text = any(isinstance(self.imputed.get(name), str) for name in self.features if self.features[name] == "number")
        if len(self.mean) != columns or text:
            raise ValueError("expected a mean of each coded feature, and numbers to impute for numbers")
        return self

    def new_cases(self, path: Path, spec: Spec) -> Iterator[NewCase]:
        """The rows of a CSV, TSV or Parquet file; a label is not needed."""
        import torch

        names, values = new_rows(path, self)
        for name, row in zip(names, values, strict=True):
            yield NewCase(name, to_tensor(row[None], torch.float32))

    def meaning(self) -> list[str]:
        """Features with their kind and unit, and the unit of the number to predict, if one is declared."""
        told = [described(column, kind, self.units.get(column)) for column, kind in self.features.items()]
        answer = self.answer_unit()
        return [*told, described("the answer", "number", answer)] if answer else told

    def answer_unit(self) -> str:
        return self.units.get(self.label, "")

    def standardised(self) -> tuple[list[float], list[float]]:
        return self.mean, self.scale

    def categories(self) -> list[list[int]]:
        found, first = [], 0
        for kind in self.features.values():
            columns = 1 if kind == "number" else len(kind) - 1
            if kind != "number":
                found.append(list(range(first, first + columns)))
            first += columns
        return found


def new_rows(path: Path, preparation: TablePreparation) -> tuple[list[str], NDArray[np.float64]]:
    """Rows of a file that no site file declares, prepared as the training rows were: names, and N x F values.

    Other columns, the label among them, may be there or not.

    Raises:
        DataError: with the file, the line and the column, expected and got.
    """
    features, imputed, form = preparation.features, preparation.imputed, preparation.cells
    optional = preparation.answers or [preparation.label]
    pieces = read_cells(path, path.name, form, Problems(), list(features), numeric(features), optional)
    frame = joined(pieces)
    frame[ROW] = [f"{path.name}:{place}" for place in frame[PLACE]]
    for column in features:
        missing = frame[ROW][frame[column].isna()].tolist()
        if missing and column not in imputed:
            raise DataError(
                f"{missing[0]}: column '{column}' is missing; the model was trained on rows "
                "without missing values, so it has no value to put there"
            )
    _, raw = coded(features, frame, np.zeros(len(frame), dtype=bool), Problems())
    values = filled(features, raw, imputed)
    return frame[ROW].tolist(), (values - np.array(preparation.mean)) / np.array(preparation.scale)
