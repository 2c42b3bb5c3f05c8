# SPDX-License-Identifier: Apache-2.0
"""The Python API, for notebooks and scripts (docs/python.md). Its names are imported from ``medpfl`` itself."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from medpfl.bundle import find_job, job_sites
from medpfl.compare.collect import RESULTS, read_results
from medpfl.compare.file import comparison_of, load_comparison
from medpfl.compare.results import Results
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.extras import require
from medpfl.data.declared import SPLITS
from medpfl.data.site_file import SiteFile, load_site_file
from medpfl.deployed.model_file import Deployed, load_deployed
from medpfl.deployed.predict import evaluate_at
from medpfl.deployed.predict import predict as predict_cases
from medpfl.job import EvaluationJob, Job
from medpfl.job import load_job as read_job
from medpfl.results.files import SUMMARY, read_lines, read_mixing, read_summary
from medpfl.results.schema import Summary, TrainingSummary, ValidationLine
from medpfl.results.tables import result_table

Place = str | os.PathLike[str]
Sites = Place | Mapping[str, Place]
"""A folder with ``<hospital>.yaml``, or hospital to its site file."""


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
            for name, matrix in read_mixing(self.folder).items():
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
        from medpfl.results.report import curves, heatmaps, plain_text

        with plain_text():
            drawn = {"curves": curves(self.summary, read_lines(self.folder))}
            matrices = read_mixing(self.folder) if self.mixing else {}
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
        deviation over the runs, the gain over local training with its p-value and 95 % interval (None: not known)."""
        rows = []
        for row in self.content.rows:
            gain, interval = row.gain, row.gain.interval if row.gain else None
            rows.append(
                {
                    "method": row.name,
                    "mean": row.best.mean,
                    "sd": row.best.sd,
                    "gain": gain.mean if gain else None,
                    "p": gain.p if gain else None,
                    "low": interval[0] if interval else None,
                    "high": interval[1] if interval else None,
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
        from medpfl.compare.comparison_tables import ranked
        from medpfl.compare.figures import communication, curves, label_counts

        rows = ranked(self.content)
        drawn = {
            "curves": curves(rows, self.content),
            "communication": communication(rows, self.content),
            "labels": label_counts(self.content),
        }
        return {name: Svg(text) for name, text in drawn.items() if text}


@dataclass(frozen=True)
class Model:
    """A model that a job left at a hospital."""

    file: Path
    deployed: Deployed

    def predict(self, source: Place, output: Place) -> pd.DataFrame:
        """Predict every case in ``source`` and write the predictions into the new folder ``output``, as ``medpfl
        predict`` does; returns a row a case.

        Raises:
            DataError: a case cannot be read or does not fit; nothing is written.
            MedPFLError: the folder holds something, or cannot be written.
        """
        return pd.DataFrame(predict_cases(self.deployed, Path(source), Path(output)).rows)

    def evaluate(self, site: Place | SiteFile, split: str = "test") -> dict[str, float | None]:
        """Metrics on a split of a hospital's declared data, as ``medpfl evaluate`` says them.

        Raises:
            MedPFLError: there is no such split, or the data cannot be used.
        """
        if split not in SPLITS:
            raise ConfigError(f"split must be {', '.join(SPLITS)}, got '{split}'")
        file = site if isinstance(site, SiteFile) else load_site_file(Path(site))
        return dict(evaluate_at(self.deployed, file, split).metrics)


def load_job(job: Place) -> Job | EvaluationJob:
    """The job of a folder, or the shipped job of that name; change it with ``dataclasses.replace``.

    Raises:
        ConfigError: there is none, or it is not valid.
    """
    return read_job(find_job(os.fspath(job)))


def load_model(file: Place) -> Model:
    """A deployed model's file, ``MODEL-CHOICE.safetensors`` at a hospital.

    Raises:
        MedPFLError: it is no such file, or was altered.
    """
    return Model(Path(file), load_deployed(Path(file)))


def load_result(folder: Place) -> JobResult | ComparisonResult:
    """What a job or a comparison left in a folder; also in a folder that FLARE's ``run.get_result()`` names.

    Raises:
        MedPFLError: neither left anything there, or a file was altered.
    """
    path = Path(folder)
    if (path / RESULTS).is_file():
        return ComparisonResult(path, read_results(path))
    for place in (path, path / "workspace" / "results", path / "server" / "simulate_job" / "results"):
        if (place / SUMMARY).is_file():
            return JobResult(place)
    raise MedPFLError(f"{path} holds no results: neither {SUMMARY} of a job nor {RESULTS} of a comparison")


def simulate(
    job: Job | EvaluationJob | Place,
    sites: Sites | None = None,
    results: Place | None = None,
    progress: Callable[[int], None] = lambda rounds: None,
) -> JobResult:
    """Run a job in this process, one hospital after another, without FLARE; equal to FLARE bit for bit on one machine.

    Args:
        job: a job, a job folder, or the name of a shipped job.
        sites: the hospitals; None: the demo data of the shipped job.
        results: new folder; None: ``results/JOB-simulated``.
        progress: called with the number of finished rounds.

    Raises:
        MedPFLError: the job or the hospitals' data cannot be used.
    """
    from medpfl.rounds.simulate import simulate as run
    from medpfl.rounds.simulate import simulate_evaluation

    loaded = job if isinstance(job, Job | EvaluationJob) else load_job(job)
    folder = Path("results") / f"{loaded.name}-simulated" if results is None else Path(results)
    with tempfile.TemporaryDirectory(prefix="medpfl-") as scratch:
        files = _files(sites)
        if files is None:
            files = job_sites(None, loaded.name, Path(scratch))
        if isinstance(loaded, EvaluationJob):
            simulate_evaluation(loaded, files, folder, folder / "home")
        else:
            run(loaded, files, folder, folder / "home", lambda coordinator: progress(coordinator.done))
    return JobResult(folder)


def compare(
    file: Place | Mapping[str, Any],
    sites: Sites | None = None,
    results: Place | None = None,
    jobs: int = os.cpu_count() or 1,
) -> ComparisonResult:
    """Compare methods over seeds on the same hospitals, as ``medpfl compare`` does; finished runs are kept.

    Args:
        file: a comparison file, or what it would say.
        sites: the hospitals; None: the demo that the comparison names.
        results: folder; None: ``results/compare-NAME``.
        jobs: runs at a time, each in a process of its own, >= 1.

    Raises:
        MedPFLError: the comparison or the data cannot be used, or a run failed (the others are kept).
    """
    from medpfl.compare.comparison import carry_out
    from medpfl.compare.plan import Plan
    from medpfl.compare.runner import do_runs

    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    loaded = comparison_of(dict(file), "comparison") if isinstance(file, Mapping) else load_comparison(Path(file))
    folder = Path("results") / f"compare-{loaded.name}" if results is None else Path(results)

    def do(plan: Plan, what: str) -> dict[str, str]:
        return do_runs(plan, folder, jobs, tell=lambda run, reason: None, tick=lambda rounds: None)

    content = carry_out(loaded, _files(sites), folder, do)
    if content.failures:
        first = content.failures[0]
        raise MedPFLError(f"{len(content.failures)} runs failed; {first.run}: {first.reason}")
    return ComparisonResult(folder, content)


def _files(sites: Sites | None) -> dict[str, Path] | None:
    """Hospital to its site file.

    Raises:
        ConfigError: the folder is none, or holds no site file.
    """
    if sites is None:
        return None
    if isinstance(sites, Mapping):
        return {site: Path(path) for site, path in sites.items()}
    found = {path.stem: path for path in sorted(Path(sites).glob("*.yaml"))}
    if not found:
        raise ConfigError(f"{sites} is no folder with site files (<hospital>.yaml)")
    return found
