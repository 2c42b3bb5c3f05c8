# SPDX-License-Identifier: Apache-2.0
"""The per-hospital result table, from a job's summary.json; the console and the report show the same one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from medpfl.results.presence import presence
from medpfl.results.schema import EvaluationSummary, FinalLine, Summary
from medpfl.tasks.metrics.certainty import Interval, interval_text
from medpfl.tasks.metrics.digits import USUAL, digits, fewer
from medpfl.tasks.metrics.measure import Measure

REFERENCE_NAMES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg_before_mean": "FedAvg before the mean",
    "fedavg_finetuned": "FedAvg + fine-tuning",
}

PRESENCE = "trained in rounds"
"""Heading of the column of ``ResultTable.presence``."""
SCORED = "scored after"
"""Heading of the row of ``ResultTable.scored``."""
GAIN = "gain over local"
"""Heading of the row of ``ResultTable.gain_texts``."""
_ERROR = 1e-12
"""Share of a score that can be the rounding error of a mean."""


@dataclass(frozen=True)
class ResultTable:
    """Test scores by hospital and model; of an evaluation job, by hospital and metric.

    Attributes:
        score: what the values are, with their unit.
        models: columns: model names, references first; or metrics.
        labels: the columns' headings.
        sites: rows.
        sizes: training samples of each hospital; or its test cases.
        values: sites x models; NaN where there is no result.
        measure: which values are better, where the columns are models that compete; None where they are metrics.
        presence: hospital to the rounds that it trained in, in words; a hospital that is no row took no part. Empty
            where all were there all the time.
        scored: after what each model was evaluated, the mixing or local steps; empty where it is not known.
        bands: of each model, the 95 % interval of its mean gain over local training (``mean_band``); None where it
            is not known. Empty for other values than the score.
        decimals: of each column.
    """

    score: str
    models: list[str]
    labels: list[str]
    sites: list[str]
    sizes: list[int]
    values: NDArray[np.float64]
    measure: Measure | None
    presence: dict[str, str] = field(default_factory=dict)
    scored: list[str] = field(default_factory=list)
    bands: list[Interval | None] = field(default_factory=list)
    decimals: list[int] = field(default_factory=list)

    @property
    def absent(self) -> list[str]:
        """Hospitals that took no part."""
        return [site for site in self.presence if site not in self.sites]

    @property
    def heading(self) -> str:
        """Heading of the column of sizes."""
        return "training samples" if self.measure else "test cases"

    def best(self, row: int) -> float:
        """The best value of a row; NaN where there is none or the columns do not compete."""
        return self.measure.best(self.values[row]) if self.measure else float("nan")

    def texts(self, values: NDArray[np.float64]) -> list[str]:
        """A row's values, as the table has them."""
        return [value_text(value, decimals) for value, decimals in zip(values, self._decimals, strict=True)]

    @property
    def _decimals(self) -> list[int]:
        return self.decimals or [USUAL] * len(self.models)

    def gains(self) -> list[float | None] | None:
        """By how much each model is better than local training (None: of itself), mean over the hospitals that have
        both scores, NaN where none has; None without local training."""
        if self.measure is None or "local" not in self.models:
            return None
        local = self.models.index("local")
        gains = _mean(self.measure.gain(1, 0) * (self.values - self.values[:, [local]]))
        # What one hospital wins and another loses leaves the rounding error of their scores, and no gain.
        gains[abs(gains) <= _ERROR * abs(np.nan_to_num(self.values)).max(axis=0, initial=0.0)] = 0.0
        return [None if place == local else gain for place, gain in enumerate(gains.tolist())]

    def gain_texts(self) -> list[str] | None:
        """ "+0.136 [0.05, 0.22]": the gains in words, with their intervals where they are known, and of how many
        hospitals they are where some lack a score."""
        gains = self.gains()
        if gains is None:
            return None
        bands = self.bands or [None] * len(gains)
        local = self.values[:, [self.models.index("local")]]
        return [
            "" if gain is None else f"{_signed(gain, decimals)} {interval_text(band, fewer(decimals))}".rstrip() + some
            for gain, band, some, decimals in zip(
                gains, bands, self._some(self.values - local), self._decimals, strict=True
            )
        ]

    def _some(self, values: NDArray[np.float64]) -> list[str]:
        """Of how many hospitals each column's mean is, where some lack a value."""
        counted = (~np.isnan(values)).sum(axis=0)
        return [f" ({k} of {len(self.sites)} hospitals)" if 0 < k < len(self.sites) else "" for k in counted.tolist()]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Unweighted mean over the hospitals that have a result, model by model."""
        return _mean(self.values)

    @property
    def mean_texts(self) -> list[str]:
        """The mean in words, with how many hospitals it is of where some have no value."""
        return [f"{text}{told}" for text, told in zip(self.texts(self.mean), self._some(self.values), strict=True)]


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the values that are there, column by column."""
    known = ~np.isnan(values)
    return np.where(known.any(axis=0), np.where(known, values, 0).sum(axis=0) / known.sum(axis=0).clip(1), np.nan)


def result_table(summary: Summary, choice: str = "best", score: str | None = None) -> ResultTable:
    """Test scores of the models of the "best" or of the "last" round (fine-tuning has one model only)."""
    if isinstance(summary, EvaluationSummary):
        return _metric_table(summary)
    score = score or summary.score
    found: dict[str, dict[str, float]] = {}
    lines: dict[str, list[FinalLine]] = {}
    for line in summary.test:
        if line.choice == choice or line.model == "fedavg_finetuned":
            lines.setdefault(line.model, []).append(line)
            value = line.metrics.get(score)
            found.setdefault(line.model, {})[line.site] = float("nan") if value is None else value
    models = [name for name in REFERENCE_NAMES if name in found]
    models += [name for name in found if name not in REFERENCE_NAMES]
    labels = [REFERENCE_NAMES.get(name, name.replace("_", " ").capitalize()) for name in models]
    sites = [site for site in summary.roster if site in summary.sizes]
    values = np.array([[found[model].get(site, float("nan")) for model in models] for site in sites], dtype=float)
    sizes = [summary.sizes[site]["train"] for site in sites]
    measure = summary.measure(score)
    shaped = values.reshape(len(sites), len(models))
    scored = [summary.scored.get(model, "") for model in models] if summary.scored else []
    # Of fine-tuning's only model, which has no last round, the hospitals' gains are over the best round's local model.
    own = {model: [line for line in tested if line.choice == choice] for model, tested in lines.items()}
    bands = [mean_band(own[model]) for model in models] if score == summary.score else []
    decimals = [decimals_of(summary, score)] * len(models)
    return ResultTable(
        summary.label(score), models, labels, sites, sizes, shaped, measure, presence(summary), scored, bands, decimals
    )


def decimals_of(summary: Summary, metric: str) -> int:
    """With how many decimals a metric's values are written, in all tables of a job."""
    return digits(line.metrics.get(metric) for line in summary.test)


def mean_band(lines: Sequence[FinalLine]) -> Interval | None:
    """95 % interval of a model's mean gain over local training, from the hospitals' test patients, who are independent
    of each other; of which patients these happened to be, not of seeds. None where a hospital's interval is not known.

    Ends by MOVER (Zou and Donner, Statistics in Medicine 27, 2008, Eq. 4): with gains g_k in [l_k, u_k] of K hospitals
    mean(g) - sqrt(sum (g_k - l_k)^2) / K  and  mean(g) + sqrt(sum (u_k - g_k)^2) / K.
    """
    known = [(sure.gain, *sure.gained) for line in lines if (sure := line.certainty) and sure.gained is not None]
    if not known or len(known) < len(lines):
        return None
    gain, low, high = np.array(known, dtype=float).T
    below, above = np.sqrt(((gain - low) ** 2).sum()), np.sqrt(((high - gain) ** 2).sum())
    return float(gain.mean() - below / len(gain)), float(gain.mean() + above / len(gain))


def other_tables(summary: Summary) -> list[ResultTable]:
    """The same of every metric but the score, at the best round, in the task's order; of an evaluation job none."""
    if isinstance(summary, EvaluationSummary):
        return []
    told = list(dict.fromkeys(metric for line in summary.test for metric in line.metrics))
    names = [
        *(name for name in summary.metrics if name in told),
        *(name for name in told if name not in summary.metrics),
    ]
    return [result_table(summary, score=name) for name in names if name != summary.score]


def metric_means(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Every metric, the score first: headings, and of each model the hospitals' mean at the best round; no lines where
    there is one metric only."""
    others = other_tables(summary)
    if not others:
        return [], []
    every = [result_table(summary), *others]
    rows = [[label, *(table.mean_texts[k] for table in every)] for k, label in enumerate(every[0].labels)]
    return ["model", *(table.score for table in every)], rows


def value_text(value: float, decimals: int) -> str:
    """A score as tables have it; "n/a" where it is not defined, or there is none."""
    return "n/a" if np.isnan(value) else f"{value:.{decimals}f}"


def _signed(value: float, decimals: int) -> str:
    return "n/a" if np.isnan(value) else f"{value:+.{decimals}f}"


def _metric_table(summary: EvaluationSummary) -> ResultTable:
    """All metrics of the given model, hospital by hospital."""
    lines = {line.site: line.metrics for line in summary.test}
    metrics = list(dict.fromkeys(metric for site in sorted(lines) for metric in lines[site]))
    labels = [_capital(summary.label(metric)) for metric in metrics]
    sites = sorted(lines)
    values = np.array([[lines[site].get(metric) for metric in metrics] for site in sites], dtype=float)
    sizes = [summary.sizes[site]["test"] for site in sites]
    decimals = [decimals_of(summary, metric) for metric in metrics]
    shaped = values.reshape(len(sites), len(metrics))
    return ResultTable("metrics", metrics, labels, sites, sizes, shaped, None, decimals=decimals)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
