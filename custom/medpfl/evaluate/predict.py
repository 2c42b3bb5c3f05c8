# SPDX-License-Identifier: Apache-2.0
"""Predict new cases with a deployed model, and test it on a declared dataset; no federation is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medpfl.core.errors import DataError, MedPFLError
from medpfl.evaluate.deployed import Deployed
from medpfl.evaluate.models import evaluate, write_cases
from medpfl.sites.samples import SiteData
from medpfl.sites.site_file import SiteFile
from medpfl.tasks.base import Evaluation, NewCase

SUMMARY = "predictions.csv"
_BATCH = 16  # whole slices are larger than the samples of training


@dataclass(frozen=True)
class Predictions:
    """What was predicted.

    Attributes:
        rows: one a case: its name and, for classes, the class found and the probability of each; for segmentations,
            the file written and the volume of each class.
        file: the CSV file with these rows.
        note: what the model's own hospital found about its calibration or results; how far to trust the numbers.
    """

    rows: list[dict[str, Any]]
    file: Path
    note: str


def predict(
    model: Deployed,
    source: Path,
    folder: Path,
    probabilities: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Predictions:
    """Predict every case in ``source`` and write the results into a new folder.

    Args:
        source: what the task reads: a file, a folder or a list.
        probabilities: for segmentations, write each class's probability beside the segmentation.
        progress: called with each case's name when it is done.

    Raises:
        DataError: a case cannot be read or does not fit the model; the cases before it are written.
        MedPFLError: the folder exists already and holds something, or cannot be written.
    """
    _prepare_folder(folder)
    rows: list[dict[str, Any]] = []
    try:
        for case in model.task.new_cases(source, model.preparation):
            rows.append({"case": case.name, **_predict_case(model, case, folder, probabilities)})
            progress(case.name)
    except OSError as error:
        raise MedPFLError(f"cannot write into {folder}: {error}") from error
    finally:
        if rows:
            write_cases(folder / SUMMARY, Evaluation({}, rows))
    if not rows:
        raise DataError(f"{source}: holds nothing to predict")
    return Predictions(rows, folder / SUMMARY, _note(model))


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise MedPFLError(f"{folder} holds files already; name a new folder")
    except OSError as error:
        raise MedPFLError(f"cannot write into {folder}: {error.strerror}") from error


def _predict_case(model: Deployed, case: NewCase, folder: Path, probabilities: bool) -> dict[str, Any]:
    expected, got = model.input_shape, tuple(case.inputs.shape[1:])
    if len(got) != len(expected) or got[0] != expected[0] or (case.save is None and got != expected):
        what = f"{expected[0]} channels" if case.save else f"shape {list(expected)}"
        found = f"{got[0]} channels" if case.save else f"shape {list(got)}"
        raise DataError(f"{case.name}: the model takes inputs of {what}, got {found}")
    device = _device()
    model.networks.to(device)
    outputs = torch.cat([model(part.to(device)).float().cpu() for part in torch.split(case.inputs, _BATCH)])
    if case.save:
        return case.save(outputs, folder, model.class_names, probabilities)
    # A recording's windows count alike.
    shares = model.task.decide(outputs).double().mean(dim=0)
    found_class = model.class_names[int(shares.argmax())]
    named = zip(model.class_names, shares.tolist(), strict=True)
    return {"predicted": found_class, **{f"p_{name}": round(share, 6) for name, share in named}}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _note(model: Deployed) -> str:
    history = model.meta.history
    if history is None:
        return "This file does not say how well the model did at its own hospital."
    results = ", ".join(f"{name} {value:.3f}" for name, value in history.test.items() if value is not None)
    note = f"On {history.cases['test']} test cases of {history.site}: {results}."
    if found := history.calibration:
        note += f" Its probabilities there: expected calibration error {found.ece:.3f}, Brier score {found.brier:.3f}."
    return note + " For research; not a medical device."


def evaluate_at(model: Deployed, site_file: SiteFile, split: str) -> Evaluation:
    """Test a deployed model on a dataset that a site file declares, under the name the model's task asks for.

    Tables and recordings are standardised with that hospital's own training part, as in training.

    Raises:
        MedPFLError: the dataset is not declared, does not fit the model, or the split is empty.
    """
    return evaluate_on(model, model.task.load(site_file), split)


def evaluate_on(model: Deployed, data: SiteData, split: str) -> Evaluation:
    """The same for data that were read already.

    Raises:
        DataError: the data do not fit the model, or the split is empty.
    """
    shape = tuple(data.splits["train"].inputs.shape[1:])
    if data.class_names != model.class_names:
        raise DataError(f"the model knows the classes {model.class_names}, the site file declares {data.class_names}")
    if shape != model.input_shape:
        raise DataError(f"the model takes inputs of shape {list(model.input_shape)}, the data have {list(shape)}")
    device = _device()
    networks = model.networks.to(device)
    found = evaluate(model.method, model.name, networks, model.task, data.splits[split], device)
    if found is None:
        raise DataError(f"the {split} split is empty")
    return found
