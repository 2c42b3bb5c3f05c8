# SPDX-License-Identifier: Apache-2.0
"""Predict new cases with a deployed model, and test it on a declared dataset; no federation is needed."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medpfl.core.devices import moved, training_device
from medpfl.core.errors import DataError, MedPFLError, counted
from medpfl.core.repeatable import repeatable
from medpfl.data.meaning import other_inputs
from medpfl.data.preparation import NewCase, Row
from medpfl.data.samples import Samples, SiteData, joined_targets
from medpfl.data.site_file import SiteFile
from medpfl.data.target import listed
from medpfl.deployed.evaluate import decide, write_cases
from medpfl.deployed.labels import dice_of, find_labels
from medpfl.deployed.model_file import Deployed
from medpfl.tasks.contract import Evaluation
from medpfl.tasks.metrics.contract import Metric, at_threshold
from medpfl.tasks.metrics.digits import digits
from medpfl.tasks.metrics.measure import Measure

SUMMARY = "predictions.csv"
_BATCH = 16  # whole slices are larger than the samples of training
_WINDOW = 512  # pixels about, at least; longer slices are segmented window by window, so that memory does not grow


@dataclass(frozen=True)
class Predictions:
    """What was predicted.

    Attributes:
        rows: one a case: its name; of a super model, which of its models served ("global" or a hospital's name) and how
            sure the selector was; what the task answers (``Task.answer``); for segmentations, the file written, the
            volume of each class and, where there is a label, Dice.
        file: the CSV file with these rows.
        note: first what the labels say of these cases, if there are any; then how the model did in its own test.
    """

    rows: list[Row]
    file: Path
    note: str


def predict(
    model: Deployed,
    source: Path,
    folder: Path,
    probabilities: bool = False,
    progress: Callable[[str], None] = lambda name: None,
    labels: Path | None = None,
    dicom: bool = False,
) -> Predictions:
    """Predict every case in ``source`` and write the results into a new folder: all of them or none.

    Args:
        source: what the task reads: a file, a folder or a list.
        probabilities: for segmentations, write each class's probability beside the segmentation.
        progress: called with each case's name when it is done.
        labels: for segmentations: a folder with a label map of each case, under the name of its segmentation. Without
            it, the labels that a datalist names count.
        dicom: for segmentations of DICOM images: write each as DICOM-SEG, too.

    Raises:
        DataError: a case or its label cannot be read or does not fit; nothing is written.
        MedPFLError: the folder exists already and holds something, or cannot be written.
    """
    label_of = find_labels(source, labels)
    made = _prepare_folder(folder)
    unfinished = folder / f".{os.getpid()}"
    rows: list[Row] = []
    try:
        unfinished.mkdir()
        for case in model.task.new_cases(source, model.preparation):
            if (readable := case.name.encode("utf-8", "backslashreplace").decode()) != case.name:
                raise DataError(f"{readable}: the name is not in UTF-8; rename the file (convmv -f latin1 -t utf8)")
            if labels is not None and case.save is None:
                raise DataError(f"{labels}: labels are for models that segment; test this one with 'medpfl evaluate'")
            if dicom and case.as_dicom is None:
                raise DataError(f"{source}: '{case.name}' is no DICOM image, so no DICOM-SEG can be written of it")
            label = label_of(case.name) if case.save else None  # a list of classified volumes names classes there
            row: Row = {"case": case.name, **_predict_case(model, case, unfinished, probabilities)}
            if dicom and case.as_dicom:
                row["dicom"] = case.as_dicom(unfinished / str(row["file"]), model.class_names)
            if label is not None:
                classes = len(model.class_names)
                found = dice_of(unfinished / str(row["file"]), label, classes, model.task.structures(classes))
                row["dice"] = round(found, 6)
            rows.append(row)
            progress(case.name)
        if not rows:
            raise DataError(f"{source}: holds nothing to predict")
        write_cases(unfinished / SUMMARY, Evaluation({}, rows))
        for file in unfinished.iterdir():
            file.rename(folder / file.name)
    except OSError as error:
        raise MedPFLError(f"cannot write into {folder}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        for empty in made if not any(folder.iterdir()) else []:
            empty.rmdir()
    return Predictions(rows, folder / SUMMARY, "\n".join([*_totals(rows), _note(model)]))


def _totals(rows: list[Row]) -> list[str]:
    """Mean Dice over the cases with a label, and how often each model of a super model served."""
    lines = []
    if known := [float(row["dice"]) for row in rows if "dice" in row]:
        lines.append(f"Dice of these cases: {sum(known) / len(known):.4f}, mean of {len(known)} with a label.")
    if "served_by" in rows[0]:
        served = Counter(row["served_by"] for row in rows)
        lines.append("Served by: " + ", ".join(f"{name} {count}" for name, count in served.most_common()) + ".")
    return lines


def _prepare_folder(folder: Path) -> list[Path]:
    """The folders that were not there before and are now, innermost first.

    Raises:
        MedPFLError: it holds something, or cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise MedPFLError(f"{folder} holds files already; name a new folder")
    except OSError as error:
        raise MedPFLError(f"cannot write into {folder}: {error.strerror}") from error
    return made


def _predict_case(model: Deployed, case: NewCase, folder: Path, probabilities: bool) -> Row:
    expected, got = model.input_shape, tuple(case.inputs.shape[1:])
    if len(got) != len(expected) or got[0] != expected[0] or (case.save is None and got != expected):
        what = f"{expected[0]} channels" if case.save else f"shape {list(expected)}"
        found = f"{got[0]} channels" if case.save else f"shape {list(got)}"
        raise DataError(f"{case.name}: the model takes inputs of {what}, got {found}")
    device = training_device()
    spec = model.task.spec  # one of whole cases has windows of its own
    window = None if spec.whole else max([_window(spec.multiple), *expected[1:]])
    with repeatable(device), model.on(device) as networks:
        served = model.method.serve(model.name, networks, case.inputs, expected, device)

        def forward(inputs: Tensor) -> Tensor:
            return model.task.infer(served.network, inputs)

        parts = torch.split(case.inputs, _BATCH)
        outputs = torch.cat([_run(forward, moved(part, device), window).cpu() for part in parts])
    if not bool(outputs.isfinite().all()):  # decided on, they would be the first class: healthy, no lesion
        raise DataError(
            f"{case.name}: the model's outputs are not numbers (NaN or infinite), so nothing is said of it: its "
            "weights are broken, or this case has values far beyond those of training"
        )
    if case.save:
        return {**served.told, **case.save(outputs, folder, model.class_names, probabilities)}
    return {**served.told, **model.task.answer(model.task.decide(outputs), model.class_names)}


def _window(multiple: int) -> int:
    """Length of a window that the network takes: a multiple of this, such as 513 of 9."""
    return -(-_WINDOW // multiple) * multiple


def _run(network: Callable[[Tensor], Tensor], inputs: Tensor, window: int | None) -> Tensor:
    """Outputs, float32. Slices (N x C x H x W) longer than a window are taken window by window."""
    with torch.inference_mode():
        if window is None or inputs.dim() != 4 or max(inputs.shape[2:]) <= window:
            return network(inputs).float()
        from monai.inferers import sliding_window_inference

        size = [min(window, length) for length in inputs.shape[2:]]
        found: Any = sliding_window_inference(inputs, size, 1, network, overlap=0.25, mode="gaussian")
        outputs: Tensor = found.float()
        return outputs


def _note(model: Deployed) -> str:
    history = model.meta.history
    if history is None or not history.test:
        return "This file does not say how well the model did at its own hospital."
    measures = model.task.measures
    results = ", ".join(
        f"{name} {measures.get(name, Measure()).text(value, digits([value]))}"
        for name, value in history.test.items()
        if value is not None
    )
    tested = f"{counted(history.cases['test'], 'test case')} of {history.site}"
    note = f"How the model did before, on other cases ({tested}): {results}."
    if found := history.calibration:
        note += f" Its probabilities there: expected calibration error {found.ece:.3f}, Brier score {found.brier:.3f}."
    return f"{note} This says nothing about the cases predicted now. For research; not a medical device."


def evaluate_on(model: Deployed, data: SiteData, split: str) -> Evaluation:
    """Test a deployed model on a hospital's data. Tables and recordings are standardised with that hospital's own
    training part, as in training.

    Raises:
        DataError: the data do not fit the model, or the split is empty.
    """
    return _evaluated(model, model.task.tested, _decisions(model, data, split), data.splits[split])


def other_split(model: Deployed, data: SiteData, site_file: SiteFile) -> str | None:
    """A sentence where the data are those of the model's own hospital, or may be, and are cut otherwise than when it
    was trained: a split that is drawn is drawn of all cases. None where it is not, or the file says who is where."""
    history, site, rule = model.meta.history, site_file.site, site_file.datasets[model.task.dataset].split
    if rule.file or rule.column:
        return None
    now = {split: len(set(samples.case.tolist())) for split, samples in data.splits.items()}
    if history is None or site not in (None, history.site) or history.cases == now:
        return None
    before = ", ".join(f"{history.cases.get(split, 0)} {split}" for split in now)
    return (
        f"The splits have other numbers of cases than when the model was trained at {history.site} ({before}; now "
        f"{', '.join(map(str, now.values()))}): cases that are tested here may be some that it was trained on. "
        "'split.file' in the site file keeps cases where they are."
    )


def evaluate_on_all(
    model: Deployed, hospitals: Mapping[str, SiteData], split: str
) -> tuple[dict[str, Evaluation], Evaluation]:
    """What is watched of it (``Task.watched``) at several hospitals, and on all their cases together, whose balanced
    accuracy and AUC are no mean of the hospitals' own. Only for data that are on one machine.

    Raises:
        DataError: the data of a hospital do not fit the model, or its split is empty.
    """
    found = {site: _decisions(model, data, split) for site, data in hospitals.items()}
    parts = {site: data.splits[split] for site, data in hospitals.items()}
    watched = model.task.watched
    each = {site: _evaluated(model, watched, found[site], parts[site]) for site in hospitals}
    together = joined_targets(list(parts.values()))
    return each, _evaluated(model, watched, torch.cat(list(found.values())), together)


def _evaluated(model: Deployed, metrics: Sequence[Metric], decisions: Tensor, samples: Samples) -> Evaluation:
    """With the threshold that the model's hospital chose on its validation cases."""
    history = model.meta.history
    return model.task.evaluate(decisions, samples, at_threshold(metrics, history.threshold if history else None))


def _decisions(model: Deployed, data: SiteData, split: str) -> Tensor:
    shape = data.input_shape
    if data.class_names != model.class_names:
        raise DataError(
            f"the model knows the classes {listed(model.class_names)}, "
            f"the site file declares {listed(data.class_names)}"
        )
    if shape != model.input_shape:
        raise DataError(f"the model takes inputs of shape {list(model.input_shape)}, the data have {list(shape)}")
    meaning = data.preparation.meaning() if data.preparation else []
    if differs := other_inputs(meaning, "the site file's", model.meta.recipe.meaning, "the model's"):
        raise DataError(differs)
    if not len(data.splits[split]):
        raise DataError(f"the {split} split is empty")
    device = training_device()
    with repeatable(device), model.on(device) as networks:
        return decide(model.method, model.name, networks, model.task, data.splits[split], device)
