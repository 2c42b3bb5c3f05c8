# SPDX-License-Identifier: Apache-2.0
"""What a run's models say of each hospital's own validation and test cases: kept beside run.json, on this machine, so
that a comparison can resample patients and choose as the hospitals would."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from medpfl.core.devices import training_device
from medpfl.core.errors import MedPFLError, unreadable
from medpfl.core.repeatable import repeatable
from medpfl.data.samples import Samples, SiteData
from medpfl.data.untrusted import BROKEN_NPZ
from medpfl.deployed.evaluate import decide, sheet_of_validation
from medpfl.deployed.model_file import Deployed
from medpfl.tasks.contract import Task
from medpfl.tasks.metrics.contract import CaseMetric, at_threshold
from medpfl.tasks.metrics.sheet import Sheet

CASES = "cases.npz"
SPLITS = ("validation", "test")
Sheets = dict[str, dict[str, Sheet]]
"""Hospital to split to what a model said; a hospital without validation cases has the test only."""


class Kept:
    """Collects them while a run is written down."""

    def __init__(self, task: Task):
        self._task = task
        self._arrays: dict[str, NDArray[np.generic]] = {}

    def add(self, label: str, site: str, deployed: Deployed, data: SiteData) -> None:
        """One hospital's model of the row ``label``."""
        for split, sheet in self._sheets(deployed, data).items():
            place = f"{split}/{site}"
            self._arrays[f"{place}/answers/{label}"] = sheet.answers.numpy()
            self._arrays[f"{place}/patient"] = sheet.patient
            if not isinstance(sheet.metric, CaseMetric):
                self._arrays[f"{place}/targets"] = sheet.truth.targets[:].numpy()
                self._arrays[f"{place}/case"] = sheet.truth.case
                threshold = getattr(sheet.metric, "threshold", None)
                if threshold is not None:
                    self._arrays[f"{place}/threshold/{label}"] = np.array(float(threshold))

    def _sheets(self, deployed: Deployed, data: SiteData) -> dict[str, Sheet]:
        task, device, found = self._task, training_device(), {}
        history, test = deployed.meta.history, data.splits["test"]
        metrics = at_threshold([task.metric(task.score)], history.threshold if history else None)
        with repeatable(device), deployed.on(device) as networks:
            model = (deployed.method, deployed.name, networks)
            if len(data.splits["validation"]):
                found["validation"] = sheet_of_validation(*model, task, data, device)
            found["test"] = task.sheet(decide(*model, task, test, device), test, metrics)
        return found

    def write(self, folder: Path) -> None:
        """Into ``folder``."""
        with open(folder / CASES, "wb") as file:
            np.savez_compressed(file, **self._arrays)  # type: ignore[arg-type]


def read_all(folders: Sequence[Path], task: Task) -> list[dict[str, Sheets]] | None:
    """What the models of several runs said, run by run; None where no run has kept it, as runs of before.

    Raises:
        MedPFLError: a file cannot be read, or is missing where other runs have theirs: what is computed of fewer runs
            than the gains are would pass for theirs.
    """
    found = [read_cases(folder, task) for folder in folders]
    lost = [folder / CASES for folder, cases in zip(folders, found, strict=True) if not cases]
    if lost and len(lost) < len(found):
        raise MedPFLError(f"{lost[0]} is missing; remove its folder to repeat that run")
    return found if found and not lost else None


def read_cases(folder: Path, task: Task) -> dict[str, Sheets]:
    """Label to what its models said; empty for a run of before there was such a file.

    Raises:
        MedPFLError: the file cannot be read.
    """
    path = folder / CASES
    if not path.is_file():
        return {}
    found: dict[str, Sheets] = {}
    try:
        with open(path, "rb") as opened, NpzFile(opened, allow_pickle=False) as file:
            arrays = dict(file)
        for key in arrays:
            split, site, what, *rest = key.split("/", 3)  # a point of a sweep may have such a sign in its name
            if what == "answers":
                place = f"{split}/{site}"
                found.setdefault(rest[0], {}).setdefault(site, {})[split] = _sheet(arrays, task, place, rest[0])
    except BROKEN_NPZ as error:
        told = unreadable(path, "a run's answers", error)
        raise MedPFLError(f"{told}; remove its folder to repeat that run") from error
    return found


def _sheet(arrays: Mapping[str, NDArray[np.generic]], task: Task, place: str, label: str) -> Sheet:
    patient = arrays[f"{place}/patient"].astype(np.int64)
    answers = torch.from_numpy(arrays[f"{place}/answers/{label}"])
    targets = arrays.get(f"{place}/targets")
    truth = torch.zeros(len(patient)) if targets is None else torch.from_numpy(targets)
    classes = answers.shape[1] if answers.dim() > 1 else 0
    case = arrays.get(f"{place}/case", np.arange(len(patient))).astype(np.int64)  # before it was kept, each its own
    _, first = np.unique(case, return_index=True)
    owners = [str(one) for one in patient[first].tolist()]
    samples = Samples(torch.empty(len(patient), 0), truth, case, [""] * len(first), classes, owners=owners)
    threshold = arrays.get(f"{place}/threshold/{label}")
    (metric,) = at_threshold([task.metric(task.score)], None if threshold is None else float(threshold))
    return Sheet(metric, answers, samples, patient)
