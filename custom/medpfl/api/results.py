# SPDX-License-Identifier: Apache-2.0
"""What a job and a comparison left, as frames and figures."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from medpfl.compare.results import Results
from medpfl.core.extras import require
from medpfl.results.files import read_lines, read_mixing, read_summary
from medpfl.results.schema import Summary, TrainingSummary, ValidationLine
from medpfl.results.tables import result_table


class Svg(str):
    """A figure as SVG; notebooks show it."""

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class JobResult:
    """What a job left in ``folder``; everything is read when it is first asked for.

    Raises:
        MedPFLError: a file is missing, altered or of another version; ConfigError: figures without matplotlib.
    """

    folder: Path

    @cached_property
    def summary(self) -> Summary:
        """summary.json: settings, roster, sizes, best rounds, tests and events, as types."""
        return read_summary(self.folder)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Hospitals x models (of a job that evaluates: metrics): the test score of the best round by validation, NaN
        where there is none; the table that the console prints."""
        table = result_table(self.summary)
        return pd.DataFrame(table.values, index=pd.Index(table.sites, name="hospital"), columns=table.models)

    @cached_property
    def tests(self) -> pd.DataFrame:
        """Every test, by metric: hospital, model, choice of round ("best", "last", "given"), round, metric, value."""
        rows = [
            (line.site, line.model, line.choice, line.round, metric, value)
            for line in self.summary.test
            for metric, value in line.metrics.items()
        ]
        return pd.DataFrame(rows, columns=["hospital", "model", "choice", "round", "metric", "value"])

    @cached_property
    def validation(self) -> pd.DataFrame:
        """Learning curves, a metric a row: hospital ("mean": of all), model, round, metric, value."""
        rows = [
            (line.site, line.model, line.round, metric, value)
            for line in read_lines(self.folder)
            if isinstance(line, ValidationLine)
            for metric, value in line.metrics.items()
        ]
        return pd.DataFrame(rows, columns=["hospital", "model", "round", "metric", "value"])

    @cached_property
    def mixing(self) -> dict[str, dict[int, NDArray[np.float64]]]:
        """Slot to round to the K x K matrix that mixed it: row k says what the model of hospital k is made of, in the
        order of ``summary.roster``. Empty where nothing was mixed."""
        found: dict[str, dict[int, NDArray[np.float64]]] = {}
        if isinstance(self.summary, TrainingSummary):
            for name, matrix in read_mixing(self.folder, len(self.summary.roster)).items():
                slot, _, number = name.rpartition("/")
                found.setdefault(slot, {})[int(number)] = matrix
        return found

    @cached_property
    def models(self) -> dict[str, dict[str, Path]]:
        """Hospital to the name of each deployed model ("personal-best", ...) to its file: where the job ran on this
        machine. In a real federation they lie at the hospitals, and this is empty."""
        found: dict[str, dict[str, Path]] = {}
        for file in sorted(self.folder.glob("ho*/*/**/*.safetensors")):
            home, site, *inside = file.relative_to(self.folder).parts
            if home in ("home", "hospitals") and (home == "hospitals" or inside[-2] == "models"):
                found.setdefault(site, {})[file.stem] = file
        return found

    @cached_property
    def figures(self) -> dict[str, Svg]:
        """The report's learning curves ("curves") and, of each slot, the last round's matrix ("mixing of SLOT")."""
        require("matplotlib", "compare", "a figure")
        from medpfl.results.curves import curves
        from medpfl.results.report import heatmaps, plain_text

        with plain_text():
            drawn = {"curves": curves(self.summary, read_lines(self.folder))}
            matrices = read_mixing(self.folder, len(self.summary.roster)) if self.mixing else {}
            drawn |= {f"mixing of {one['slot']}": one["svg"] for one in heatmaps(self.summary, matrices)}
        return {name: Svg(text) for name, text in drawn.items() if text}


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison left in ``folder``: ``content`` is its results.json, as types."""

    folder: Path
    content: Results

    @cached_property
    def leaderboard(self) -> pd.DataFrame:
        """Rows: methods, the best mean first. The test score of the best round, mean of the hospitals: its mean and
        deviation over the runs, the gain over local training with its p-value and 95 % interval, and how far the row is
        from the first, with its 95 % interval (None: not known, or it is the first)."""
        rows = []
        for row in self.content.rows:
            gain, interval = row.gain, row.gain.interval if row.gain else None
            apart = row.to_first.interval if row.to_first else None
            rows.append(
                {
                    "method": row.name,
                    "mean": row.best.mean,
                    "sd": row.best.sd,
                    "gain": gain.mean if gain else None,
                    "p": gain.p if gain else None,
                    "low": interval[0] if interval else None,
                    "high": interval[1] if interval else None,
                    "to_first": row.to_first.mean if row.to_first else None,
                    "to_first_low": apart[0] if apart else None,
                    "to_first_high": apart[1] if apart else None,
                }
            )
        better = self.content.measure.direction == "lower"
        return pd.DataFrame(rows).set_index("method").sort_values("mean", ascending=better)

    @cached_property
    def hospitals(self) -> pd.DataFrame:
        """Methods x hospitals: the mean test score over the runs."""
        found = {row.name: {site: one.best.mean for site, one in row.hospitals.items()} for row in self.content.rows}
        return pd.DataFrame.from_dict(found, orient="index", columns=self.content.hospitals)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A run a row: method, split, seed, and the test score of the best round, mean of the hospitals."""
        rows = [
            (row.name, split, seed, value)
            for row in self.content.rows
            for (split, seed), value in zip(row.pairs, row.best.values, strict=True)
        ]
        return pd.DataFrame(rows, columns=["method", "split", "seed", "score"])

    @cached_property
    def figures(self) -> dict[str, Svg]:
        """The report's figures: "curves", "communication" and "labels", so far as there is something to draw."""
        require("matplotlib", "compare", "a figure")
        from medpfl.compare.arranging import ranked
        from medpfl.compare.figures import communication, curves, label_counts

        rows = ranked(self.content)
        drawn = {
            "curves": curves(rows, self.content),
            "communication": communication(rows, self.content),
            "labels": label_counts(self.content),
        }
        return {name: Svg(text) for name, text in drawn.items() if text}
