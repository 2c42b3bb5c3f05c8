# SPDX-License-Identifier: Apache-2.0
"""``benchmarks choice``: rules by which a hospital takes one of its models, on generated scores of patients.

What each model is worth is known here, so that each rule has its regret: what the best model, the local one among them,
is worth more than the one that was taken. A patient's score of a model is N(0, 1) for the patient, the model's worth,
and N(0, 1/2) of its own, so that the difference of two models has a standard deviation of 1 between patients.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

WORTH: dict[str, list[float]] = {
    "none gains": [0.0] * 6,
    "all lose": [-0.3] * 6,
    "all gain a little": [0.2] * 6,
    "all gain": [0.5] * 6,
    "one gains": [0.5, 0, 0, 0, 0, 0],
    "all differ": [0.5, 0.25, 0, -0.25, -0.5, -1],
}
"""What six other models are worth over the local one, in standard deviations of a difference."""
PATIENTS = (8, 20, 50)
NULL = 5
"""Times as many hospitals where no model gains: how often a rule leaves the local one then is what it promises."""
FOLDS = 10
RULES = ("the best score", "one standard error", "cross-fitted", "cross-fitted, two", "shipped", "shipped, of 5 %")


def measure(hospitals: int) -> dict[str, Any]:
    """Each rule's mean regret and how often it leaves the local model, by number of patients and by what is true."""
    if hospitals < 1:
        raise MedPFLError(f"--hospitals must be at least 1, got {hospitals}")
    found = []
    for patients in PATIENTS:
        for what, others in WORTH.items():
            regret, left = (dict.fromkeys(RULES, 0.0) for _ in range(2))
            many = hospitals * (NULL if not any(others) else 1)
            for number in range(many):
                rng = np.random.default_rng([number, patients, list(WORTH).index(what)])
                worth = np.array([0.0, *rng.permutation(others)])
                noise = rng.normal(size=(patients, len(worth))) / math.sqrt(2)
                for rule, taken in _taken(rng.normal(size=(patients, 1)) + worth + noise, number).items():
                    regret[rule] += float(worth.max() - worth[taken]) / many
                    left[rule] += (taken != 0) / many
            rules = {rule: [round(regret[rule], 4), round(left[rule], 4)] for rule in RULES}
            found.append({"patients": patients, "true": what, "rules": rules})
    return {"hospitals": hospitals, "found": found}


def _taken(values: NDArray[np.float64], number: int) -> dict[str, int]:
    """Rule to the column that it takes; the first is the local model.

    Args:
        values: patients x models.
    """
    import torch

    from medpfl.data.samples import Samples
    from medpfl.deployed.choice import choose, critical
    from medpfl.tasks.metrics.certainty import resamples
    from medpfl.tasks.metrics.masks import Dice
    from medpfl.tasks.metrics.measure import Measure
    from medpfl.tasks.metrics.sheet import sheet_of_cases

    patients = len(values)
    names = [str(case) for case in range(patients)]
    samples = Samples(torch.zeros(patients, 1), torch.zeros(patients), np.arange(patients), names)
    sheets = {str(place): sheet_of_cases(Dice(), column.tolist(), samples) for place, column in enumerate(values.T)}
    best = int(values.mean(axis=0).argmax())
    gains = values - values[:, :1]
    fitted = _cross_fitted(gains, number)
    draws = resamples(sheets["0"], number) @ gains[:, 1:] / patients
    errors = gains[:, 1:].std(axis=0, ddof=1) / math.sqrt(patients)
    surely = gains.mean(axis=0)[1:] > critical(draws, 0.95, patients) * errors

    def beyond(gain: NDArray[np.float64], times: float) -> int:
        return best if gain.mean() > times * gain.std(ddof=1) / math.sqrt(patients) else 0

    return {
        "the best score": best,
        "one standard error": beyond(gains[:, best], 1),
        "cross-fitted": beyond(fitted, 1),
        "cross-fitted, two": beyond(fitted, 2),
        "shipped": int(choose(sheets, "0", Measure(), number).model),
        "shipped, of 5 %": best if best and surely[best - 1] else 0,
    }


def _cross_fitted(gains: NDArray[np.float64], number: int) -> NDArray[np.float64]:
    """Each patient's gain with the model that is best on the patients of the other folds."""
    patients = len(gains)
    fold = np.random.default_rng(number).permutation(patients) % min(FOLDS, patients)
    best = [int(gains[fold != own].mean(axis=0).argmax()) for own in fold]
    return gains[np.arange(patients), best]


def table_of(results: dict[str, Any]) -> str:
    """By number of patients and rule: regret, mean and in each case, and in brackets how often it leaves Local."""
    from benchmarks.common import markdown

    rows = []
    for patients in PATIENTS:
        here: list[Mapping[str, Any]] = [one for one in results["found"] if one["patients"] == patients]
        for rule in RULES:
            each = [one["rules"][rule] for one in here]
            mean = sum(regret for regret, _ in each) / len(each)
            rows.append([f"{patients}", rule, f"{mean:.3f}", *(f"{regret:.3f} ({left:.0%})" for regret, left in each)])
    told = (
        f"Mean regret of {results['hospitals']} generated hospitals ({NULL} times as many where none gains), in "
        "standard deviations of the difference of two models between patients; in brackets how many of them leave "
        "their local model."
    )
    return f"{told}\n\n{markdown(['patients', 'rule', 'mean', *WORTH], rows)}"


def command(
    hospitals: Annotated[int, typer.Option(help="Generated hospitals of each kind.")] = 200,
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers and the machine's facts.")] = None,
) -> None:
    """How well rules choose among a hospital's models, on generated scores of which the truth is known."""
    from benchmarks import common

    facts = common.machine()
    results = measure(hospitals)
    common.write_json(out, "choice", facts, results)
    say(table_of(results))
