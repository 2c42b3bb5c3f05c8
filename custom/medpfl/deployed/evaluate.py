# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model at a hospital, and keep it there with a card that says what it is."""

import contextlib
import csv
import dataclasses
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import medpfl
from medpfl.component import spec_of
from medpfl.core.errors import MedPFLError
from medpfl.core.formulas import no_formula
from medpfl.core.frozen import count_weights
from medpfl.core.tied import own_state
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.deployed.card import card
from medpfl.deployed.model_file import Chosen, History, ModelMeta, Recipe, predicting
from medpfl.methods.contract import Method
from medpfl.privacy.contract import Spent
from medpfl.tasks.contract import Evaluation, Task
from medpfl.tasks.metrics.calibration import Calibration, calibration
from medpfl.tasks.metrics.certainty import Certainty
from medpfl.tasks.metrics.contract import ThresholdMetric, at_threshold, threshold_for
from medpfl.tasks.metrics.digits import rounded
from medpfl.tasks.metrics.sheet import Sheet

_NUMBER = re.compile(r"[+-]?[0-9]*\.?[0-9]*")
"""Or a sign: classes are called so, and neither is a formula."""


def evaluate(
    method: Method, name: str, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device
) -> Evaluation | None:
    """What is watched of the deployed model ``name`` on the validation split; None if the split is empty."""
    if not len(samples):
        return None
    decisions = decide(method, name, models, task, samples, device)
    metrics = at_threshold(task.watched, threshold_for(task.watched, decisions, samples))
    return task.evaluate(decisions, samples, metrics)


def evaluate_test(
    method: Method, name: str, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device
) -> tuple[Evaluation, Calibration | None]:
    """One reading of the test split: metrics, and calibration where the task's decisions are class probabilities. A
    threshold that metrics use is chosen on the validation split; where that is empty, it is 1/2.

    Raises:
        MedPFLError: the test split is empty.
    """
    samples = data.splits["test"]
    if not len(samples):
        raise MedPFLError("the test split is empty", public="the test split is empty")
    fitted: tuple[float, ...] = ()
    if task.fits_after:
        train = data.splits["train"]
        fitted = task.fit_after(decide(method, name, models, task, train, device), train)
        task = task.after_fit(fitted)
    decisions = decide(method, name, models, task, samples, device)
    found = None
    probable = decisions.is_floating_point() and decisions.shape[1:] == (samples.classes,)
    if task.spec.target is Target.CLASS and probable:
        found = calibration(samples.targets[:].numpy(), decisions.numpy())
    validation, threshold = data.splits["validation"], None
    if any(isinstance(metric, ThresholdMetric) for metric in task.tested):
        threshold = 0.5
        if len(validation):
            seen = decide(method, name, models, task, validation, device)
            threshold = threshold_for(task.tested, seen, validation)
    metrics = at_threshold(task.tested, threshold)
    evaluation = task.evaluate(decisions, samples, metrics)
    sheet = task.sheet(decisions, samples, metrics, evaluation.cases)
    return dataclasses.replace(evaluation, threshold=threshold, fitted=fitted, sheet=sheet), found


def sheet_of_validation(
    method: Method, name: str, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device
) -> Sheet:
    """The answers of the deployed model ``name`` to the validation cases, of which there must be some."""
    samples = data.splits["validation"]
    decisions = decide(method, name, models, task, samples, device)
    metrics = [task.metric(task.score)]
    return task.sheet(decisions, samples, at_threshold(metrics, threshold_for(metrics, decisions, samples)))


def decide(
    method: Method, name: str, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device
) -> Tensor:
    """The task's decisions about a non-empty split, N x ..., on the CPU."""
    return method.decide_cases(name, models.eval(), task, samples, device)


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: "best" or "last" is the ``choice`` of the ``round`` after which it was taken;
    ``privacy``: what the noise on what the hospital sent has cost."""

    job: str
    site: str
    model: str
    choice: str
    round: int
    privacy: Spent | None = None


def save_deployed(
    folder: Path,
    origin: Origin,
    method: Method,
    name: str,
    networks: nn.ModuleDict,
    task: Task,
    data: SiteData,
    hospitals: int,
    tested: tuple[Evaluation, Calibration | None],
    certainty: Certainty | None = None,
    chosen: Chosen | None = None,
) -> None:
    """Write ``<model>-<choice>.safetensors`` (the networks it predicts with), its card (.md) and its test cases (.csv).

    All three stay at the hospital. The safetensors file carries the configuration that rebuilds the networks.

    Args:
        name: the method's own name of the deployed model.
        networks: all networks of ``method``; those that this model does not predict with are left out.
        hospitals: size of the federation.
        tested: the one reading of the test split; ``certainty``: how sure its score is.
        chosen: of the model that the hospital's validation cases support, how they chose it.
    """
    evaluation, found = tested
    shape = list(data.input_shape)
    networks = predicting(method, name, networks, shape)
    recipe = Recipe(
        method=spec_of(method),
        task=spec_of(task),
        deployed=name,
        classes=data.class_names,
        input_shape=shape,
        hospitals=hospitals,
        networks=list(networks),
        meaning=data.preparation.meaning() if data.preparation else [],
    )
    history = History(
        **vars(origin),
        cases={split: len(set(samples.case.tolist())) for split, samples in data.splits.items()},
        samples_by_class={
            split: dict(zip(data.class_names, counts, strict=True))
            for split, samples in data.splits.items()
            if task.spec.target is not Target.MASK  # which may not fit into memory
            and (counts := task.spec.target.counts(samples.targets[:], samples.classes)) is not None
        },
        test={key: rounded(value) if value == value else None for key, value in evaluation.metrics.items()},
        calibration=found,
        threshold=evaluation.threshold,
        one_answer=evaluation.one_answer,
        fitted=evaluation.fitted,
        score=task.score,
        certainty=certainty,
        chosen=chosen,
        preparation=data.preparation.model_dump(mode="json") if data.preparation else {},
    )
    meta = ModelMeta(
        recipe=recipe,
        history=history,
        parameters=count_weights(networks),
        versions={"MedPFL": medpfl.__version__, "torch": str(torch.__version__)},
    )
    path = folder / f"{origin.model}-{origin.choice}.safetensors"
    meta = meta.write(path, own_state(networks))
    write_text(path.with_suffix(".md"), card(meta, path.name, task.measures))
    write_cases(path.with_suffix(".csv"), evaluation)


def write_cases(path: Path, evaluation: Evaluation) -> None:
    """Write an evaluation's cases as CSV, for this account only; where it has none, no file is left there. To a
    spreadsheet no name in it is a formula."""
    try:
        path.unlink(missing_ok=True)  # of an earlier run
    except OSError as error:
        raise MedPFLError(f"cannot write {path}: {error.strerror}") from error
    if evaluation.cases:
        text = io.StringIO()
        columns = list(dict.fromkeys(name for case in evaluation.cases for name in case))
        writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
        writer.writerow({name: _cell(name) for name in columns})
        for case in evaluation.cases:
            writer.writerow({name: _cell(told) if isinstance(told, str) else told for name, told in case.items()})
        write_text(path, text.getvalue(), private=True)


def _cell(text: str) -> str:
    return text if _NUMBER.fullmatch(text) else no_formula(text)


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Write a text file; a reader sees the old one or the new one.

    Args:
        private: nobody but this account may read it, at no moment (mode 600).

    Raises:
        MedPFLError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o600 if private else 0o666  # the latter less the account's umask
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a file may lie where its folder should
            temporary.unlink(missing_ok=True)
        why = f"a file could not be written: {error.strerror}"
        raise MedPFLError(f"cannot write {path}: {error.strerror}", why) from error
