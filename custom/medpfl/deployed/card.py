# SPDX-License-Identifier: Apache-2.0
"""The card that lies beside every deployed model: what it is, what it was trained on, how good it is, how to use it."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from medpfl.core.errors import counted
from medpfl.data.target import listed
from medpfl.methods.references import LOCAL
from medpfl.tasks.metrics.calibration import Calibration
from medpfl.tasks.metrics.certainty import interval_text
from medpfl.tasks.metrics.constant import most_frequent
from medpfl.tasks.metrics.digits import digits, fewer, threshold_text
from medpfl.tasks.metrics.measure import Measure

if TYPE_CHECKING:
    from medpfl.deployed.model_file import Chosen, History, ModelMeta, Recipe

WARNING = "**Not a medical device.** For research; it must not be used for decisions about patients."
INTENDED_USE = (
    "Research on data acquired and prepared as the training data of its hospital were. Not a medical device: it must "
    "not be used for decisions about patients."
)


def card(meta: "ModelMeta", file: str, measures: Mapping[str, Measure]) -> str:
    """The card (Markdown) of a model with a history; ``file``: the model's file name; ``measures``: of its metrics."""
    history, recipe = meta.history, meta.recipe
    assert history is not None
    return f"""# Model card: {history.model} ({history.choice} round) of {history.site}

{WARNING}

## What it is

- Made by job {history.job}, round {history.round}, with {counted(recipe.hospitals, "hospital")}
- Method: `{json.dumps(recipe.method)}`
- Task: `{json.dumps(recipe.task)}`
- Classes: {listed(recipe.classes)}
- Input: float32, N x {" x ".join(map(str, recipe.input_shape))}; {meta.parameters:,} parameters
- Made with {", ".join(f"{name} {version}" for name, version in meta.versions.items())}
- SHA-256 of the model: `{meta.sha256}`

## What it was trained on

{_learnt(history)}

{_cases(history)}
{_privacy(history)}
## Results

On this hospital's own {counted(history.cases["test"], "test case")}, read after the round had been chosen:

| metric | value |
|---|---|
{_rows(history.test, measures)}
{_majority(history)}{_certainty(history, measures)}{_doubts(history)}{_chosen(history, measures)}## Intended use

{INTENDED_USE}

## Limitations

- The results are those of one hospital's test cases, acquired as its training data were. Few cases make them uncertain.
- Other scanners, protocols, populations or laboratories are untested. Test the model on local cases before any study.
- Labels may be wrong, and groups of patients that are rare in the data may be served worse: the results do not show it.

## How to use it

    medpfl predict {file} INPUT -o FOLDER      # new cases
    medpfl evaluate {file} SITE_FILE              # labelled cases that a site file declares
    medpfl export {file} -o FOLDER --format onnx  # or torchscript, or monai
"""


def _learnt(history: "History") -> str:
    """Whose data the model learnt from; of the one that the hospital chose, what this one did."""
    if (history.chosen.model if history.chosen else history.model) == LOCAL:
        return "This hospital's own data alone: nothing that other hospitals learnt in this job is in it."
    return "This hospital's own data, together with the other hospitals of the federation as the method says."


def _cases(history: "History") -> str:
    splits = [split for split in ("train", "validation", "test") if split in history.cases]
    names = list(history.samples_by_class.get("train", {}))
    lines = [f"| split | cases |{''.join(f' {name} |' for name in names)}", "|---|" + "---|" * (1 + len(names))]
    for split in splits:
        counts = history.samples_by_class.get(split, {})
        lines.append(f"| {split} | {history.cases[split]} |{''.join(f' {counts.get(name, 0)} |' for name in names)}")
    return "\n".join(lines)


def _rows(metrics: dict[str, float | None], measures: Mapping[str, Measure]) -> str:
    lines = []
    for metric, value in metrics.items():
        measure = measures.get(metric, Measure())
        worse = ", lower is better" if measure.direction == "lower" else ""
        lines.append(
            f"| {metric} | {'not defined' if value is None else measure.text(value, 1 + digits([value])) + worse} |"
        )
    return "\n".join(lines)


def evaluation_card(
    recipe: "Recipe",
    sha256: str,
    site: str,
    cases: int,
    metrics: dict[str, float | None],
    found: Calibration | None,
    measures: Mapping[str, Measure],
    threshold: float | None,
) -> str:
    """What a hospital keeps of testing a model that it was given."""
    return f"""# A given model, tested at {site}

{WARNING}

- Method: `{json.dumps(recipe.method)}`, its model "{recipe.deployed}"
- Task: `{json.dumps(recipe.task)}`
- Classes: {listed(recipe.classes)}
- SHA-256 of the model: `{sha256}`

On the {counted(cases, "case")} of this hospital's test split (case by case in the CSV file beside this card):

| metric | value |
|---|---|
{_rows(metrics, measures)}
{_threshold(threshold, metrics)}{_calibration(found)}"""


def _privacy(history: "History") -> str:
    """What left with noise; the model and its results, which stay here, are not what the noise is on."""
    if history.privacy is None:
        return ""
    return f"""
What this hospital sent in this job has differential privacy: {history.privacy}. This file and its results are not
covered by it: they were not sent.
"""


def _majority(history: "History") -> str:
    """What a model that learnt nothing would reach."""
    counts = history.samples_by_class.get("test", {})
    if "accuracy" not in history.test or not any(counts.values()):
        return ""
    found = most_frequent(list(counts.values()))
    name = max(counts, key=lambda one: counts[one])
    return f"| for comparison: accuracy of always answering {name} | {found['accuracy']:.4f} |\n"


def _doubts(history: "History") -> str:
    threshold = _threshold(history.threshold, history.test)
    return f"{_one_answer(history)}{threshold}{_calibration(history.calibration)}"


def _certainty(history: "History", measures: Mapping[str, Measure]) -> str:
    """The interval of the score, and of the gain over the hospital's local model."""
    score = history.test.get(history.score or "")
    if history.certainty is None or history.score is None or score is None:
        return ""
    measure = measures.get(history.score, Measure())
    return f"""
{history.score.replace("_", " ").capitalize()} {history.certainty.text(score, measure)}.
In brackets: 95 % intervals from resampled patients; gain: over this hospital's own local model, on the same patients.
"""


def _chosen(history: "History", measures: Mapping[str, Measure]) -> str:
    """How the hospital's validation cases chose the model."""
    found = history.chosen
    if found is None:
        return ""
    measure = measures.get(history.score or "", Measure())
    d = 1 + digits(found.candidates.values())
    support = f"{counted(found.patients, 'validation patient')} support{'s' if found.patients == 1 else ''}"
    rows = "\n".join(
        f"| {name} | {'not defined' if value is None else measure.text(value, d)} |"
        for name, value in found.candidates.items()
    )
    return f"""
## Chosen by this hospital

The hospital's own {support} the model "{found.model}".
{why(found)}

| candidate | validation {history.score} |
|---|---|
{rows}

"""


def why(found: "Chosen") -> str:
    """Why the validation cases support the model that they chose, in a sentence."""
    if found.gain is None or found.error is None or found.needed is None:
        return f"{_nothing(found)} that another model is better than the local one."
    than = "more" if found.model == found.best else "not more"
    d = digits(found.candidates.values())
    gain = f"{found.gain:+.{d + 1}f} {interval_text(found.interval, fewer(d))}".strip()
    return (
        f"On them {found.best} gains {gain} over the local "
        f"model, {than} than the {found.needed:.2f} standard errors (of {found.error:.{d + 1}f}) that it takes with "
        "so many candidates."
    )


def _nothing(found: "Chosen") -> str:
    """Why nothing can be said, however many patients there are where all are of one class, say."""
    lacking = [name for name, value in found.candidates.items() if value is None]
    if found.patients < 2 or (LOCAL not in lacking and len(lacking) < len(found.candidates) - 1):
        return "Its validation patients are too few to say"
    if len(lacking) == len(found.candidates):
        return "The score is not defined on them, so they cannot say"
    one = "The local model has no score" if LOCAL in lacking else "No other model has a score"
    return f"{one} on them, so they cannot say"


def _one_answer(history: "History") -> str:
    if not history.one_answer:
        return ""
    return "\n**It gave all of these cases the same class: it tells nothing about a patient.**\n"


def _threshold(threshold: float | None, metrics: Mapping[str, float | None]) -> str:
    if threshold is None:
        return ""
    if "macro_f1" in metrics:
        which, whose, largest = "Macro F1 and exact match", "each label's", "macro F1"
    else:
        which, whose, largest = "Sensitivity and specificity", "the second class's", "their sum"
    return f"""
{which} are those of the rule "at least {threshold_text(threshold, 4)}" for {whose} probability, the
threshold at which {largest} was largest on the validation cases; it is 1/2 where these cannot tell.
"""


def _calibration(found: Calibration | None) -> str:
    if not found:
        return ""
    return f"""
Calibration on {counted(found.samples, "sample")}: expected calibration error {found.ece:.4f} (10 bins of the chosen
class's probability; 0 is perfect), Brier score {found.brier:.4f} (lower is better). The probabilities are the network's
own, not calibrated afterwards. Few cases make both numbers uncertain.
"""
