# SPDX-License-Identifier: Apache-2.0
"""At a hospital: the check of its data, and a model that a job left there."""

import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from medpfl.check.check import Report
from medpfl.core.errors import ConfigError
from medpfl.data.declared import SPLITS
from medpfl.data.site_file import SiteFile, load_site_file
from medpfl.deployed.model_file import Deployed
from medpfl.deployed.predict import evaluate_on, other_split
from medpfl.deployed.predict import predict as predict_cases

Place = str | os.PathLike[str]


@dataclass(frozen=True, repr=False)
class DataCheck:
    """What was found in a hospital's declared data. It shows patients' data and stays at the hospital."""

    report: Report

    def __repr__(self) -> str:
        """The verdict alone: a notebook keeps what its cells show, and may be given away."""
        return f"DataCheck: {self.verdict}"

    @property
    def passed(self) -> bool:
        """Nothing is wrong with the data, and the job can run; warnings do not count."""
        return self.report.passed

    @property
    def verdict(self) -> str:
        """One sentence."""
        return self.report.verdict

    @property
    def problems(self) -> list[str]:
        """One sentence each; those of one cause once."""
        return self.report.problems

    @property
    def warnings(self) -> list[str]:
        """What may be wrong, one sentence each."""
        return self.report.warnings

    @cached_property
    def counts(self) -> pd.DataFrame:
        """A row for each dataset and split: how many cases, groups (patients) and cases of each class it has."""
        rows = [
            {"dataset": one.name, "split": split, "cases": found.cases, "groups": found.groups}
            | dict(zip(one.class_names, found.classes or [0] * len(one.class_names), strict=True))
            for one in self.report.inspections
            for split, found in one.splits.items()
        ]
        return pd.DataFrame(rows)

    def write_page(self, file: Place) -> Path:
        """Write the page of ``medpfl check-data``, readable by its owner only; returns its place.

        Raises:
            DataError: it cannot be written.
        """
        from medpfl.check.page import write_page

        return write_page(self.report, Path(file))


@dataclass(frozen=True, repr=False)
class Model:
    """A model that a job left at a hospital."""

    file: Path
    deployed: Deployed

    def __repr__(self) -> str:
        """Without what was fitted on the hospital's data."""
        return f"Model: {self.deployed.name} of {self.file}"

    def predict(self, source: Place, output: Place) -> pd.DataFrame:
        """Predict every case in ``source`` and write the predictions into the new folder ``output``, as ``medpfl
        predict`` does; returns a row a case.

        Raises:
            DataError: a case cannot be read or does not fit; nothing is written.
            MedPFLError: the folder holds something, or cannot be written.
        """
        return pd.DataFrame(predict_cases(self.deployed, Path(source), Path(output)).rows)

    def evaluate(self, site: Place | SiteFile, split: str = "test") -> dict[str, float | None]:
        """Metrics on a split of a hospital's declared data, as ``medpfl evaluate`` says them, with its warning where
        cases that are tested may be some that the model was trained on.

        Raises:
            MedPFLError: there is no such split, or the data cannot be used.
        """
        if split not in SPLITS:
            raise ConfigError(f"split must be {', '.join(SPLITS)}, got '{split}'")
        file = site if isinstance(site, SiteFile) else load_site_file(Path(site))
        data = self.deployed.task.load(file)
        if split != "train" and (differs := other_split(self.deployed, data, file)):
            warnings.warn(differs, stacklevel=2)
        return dict(evaluate_on(self.deployed, data, split).metrics)
