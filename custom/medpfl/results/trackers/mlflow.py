# SPDX-License-Identifier: Apache-2.0
"""A job's numbers in MLflow: an experiment a job, and in it a run for each hospital, the mean and the server."""

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import medpfl
from medpfl.core.errors import MedPFLError
from medpfl.core.extras import require
from medpfl.results.callbacks import Callback, Failure, JobBegin, JobEnd, RoundEnd
from medpfl.results.files import read_lines, read_summary
from medpfl.results.schema import Line
from medpfl.results.trackers.scalars import scalars

ADDRESS = "MLFLOW_TRACKING_URI"
"""MLflow's own environment variable, of whoever runs the server: a job says no address."""
DATABASE = "mlflow.db"
_BATCH = 1000
_PARAMETERS = 100
"""So many numbers, and parameters, MLflow takes at once."""
_NOT_IN_NAMES = re.compile(r"[^/\w.\- ]")


class Store:
    """Writes new runs of ``experiment`` at ``address``.

    Raises:
        MedPFLError: mlflow is not installed, or the address cannot be reached or used.
    """

    def __init__(self, address: str, experiment: str):
        require("mlflow", "mlflow", "writing to MLflow")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would tell its makers what is called
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.client import MlflowClient

        try:
            self._client = MlflowClient(address)
            known = self._client.get_experiment_by_name(experiment)
            self._experiment = known.experiment_id if known else self._client.create_experiment(experiment)
        except (MlflowException, OSError) as error:
            raise MedPFLError(f"MLflow at {address} cannot be used: {error}") from error

    def has(self, tag: str, value: str) -> bool:
        """Whether a run with this tag ended well.

        Raises:
            MedPFLError: MLflow does not say it.
        """
        from mlflow.exceptions import MlflowException

        wanted = f"tags.{tag} = '{value}' and attributes.status = 'FINISHED'"
        try:
            return bool(self._client.search_runs([self._experiment], wanted, max_results=1))
        except MlflowException as error:
            raise MedPFLError(f"MLflow did not say which runs it has: {error}") from error

    def begin(self, name: str, tags: Mapping[str, str], parameters: Mapping[str, str] | None = None) -> str:
        """A new run; returns its id.

        Raises:
            MedPFLError: MLflow does not take it.
        """
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        told = {**tags, "medpfl": medpfl.__version__}
        try:
            run = str(self._client.create_run(self._experiment, tags=told, run_name=name).info.run_id)
            found = [Param(_NOT_IN_NAMES.sub("_", key), value) for key, value in (parameters or {}).items()]
            for start in range(0, len(found), _PARAMETERS):
                self._client.log_batch(run, params=found[start : start + _PARAMETERS])
        except MlflowException as error:
            raise MedPFLError(f"MLflow did not take the run {name}: {error}") from error
        return run

    def write(self, run: str, numbers: Iterable[tuple[str, float, int]], whose: str) -> None:
        """Write numbers, each with its name and round; ``whose``: for the message.

        Raises:
            MedPFLError: MLflow does not take them.
        """
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        now = int(time.time() * 1000)
        metrics = [Metric(_NOT_IN_NAMES.sub("_", name), value, now, round_) for name, value, round_ in numbers]
        try:
            for start in range(0, len(metrics), _BATCH):
                self._client.log_batch(run, metrics[start : start + _BATCH])
        except MlflowException as error:
            raise MedPFLError(f"MLflow did not take the numbers of {whose}: {error}") from error

    def end(self, run: str, status: str = "FINISHED") -> None:
        """End a run; ``status``: "FINISHED" or "FAILED".

        Raises:
            MedPFLError: MLflow does not take it.
        """
        from mlflow.exceptions import MlflowException

        try:
            self._client.set_terminated(run, status)
        except MlflowException as error:
            raise MedPFLError(f"MLflow did not take the end of a run: {error}") from error


class MlflowRuns:
    """Writes a job's numbers, into a new run for each hospital.

    Raises:
        MedPFLError: as ``Store``.
    """

    def __init__(self, address: str, experiment: str, job: str):
        self.job = job
        self._store = Store(address, experiment)
        self._runs: dict[str, str] = {}

    def write(self, lines: Iterable[Line]) -> None:
        """Write the lines' numbers, at the round that each names.

        Raises:
            MedPFLError: MLflow does not take them.
        """
        found = sorted(scalars(lines), key=lambda one: one.site)
        for site, numbers in groupby(found, key=lambda one: one.site):
            if site not in self._runs:
                self._runs[site] = self._store.begin(f"{self.job} {site}", {"job": self.job, "site": site})
            self._store.write(self._runs[site], ((one.name, one.value, one.round) for one in numbers), site)

    def close(self, status: str = "FINISHED") -> None:
        """End the runs; ``status``: "FINISHED" or "FAILED".

        Raises:
            MedPFLError: MLflow does not take it.
        """
        for run in self._runs.values():
            self._store.end(run, status)


@dataclass(frozen=True)
class MLflow(Callback):
    """Writes to the server's MLFLOW_TRACKING_URI, or where that is not set into ``mlflow.db`` of the results folder.

    A resumed job writes all rounds, those before too, into runs of its own.

    Attributes:
        experiment: MLflow's name for it; None: the job's name.
    """

    experiment: str | None = None
    _runs: list[MlflowRuns] = field(default_factory=list, init=False, repr=False, compare=False)

    def on_job_begin(self, begin: JobBegin) -> None:
        address = os.environ.get(ADDRESS) or f"sqlite:///{(begin.results / DATABASE).resolve()}"
        self._runs[:] = [MlflowRuns(address, self.experiment or begin.job, begin.job)]

    def on_round_end(self, end: RoundEnd) -> None:
        self._write(end.lines)

    def on_job_end(self, end: JobEnd) -> None:
        self._write(end.lines, "FINISHED")

    def on_failure(self, failure: Failure) -> None:
        self._write(failure.lines, "FAILED")

    def _write(self, lines: tuple[Line, ...], status: str | None = None) -> None:
        for runs in self._runs:
            runs.write(lines)
            if status:
                runs.close(status)


def write_mlflow(results: Path, address: str) -> None:
    """A finished results folder's numbers as runs at ``address`` (``http://...``, ``sqlite:///file.db``).

    Raises:
        MedPFLError: as ``read_lines``, ``read_summary`` and ``MlflowRuns``.
    """
    job, lines = read_summary(results).job, read_lines(results)
    runs = MlflowRuns(address, job, job)
    runs.write(lines)
    runs.close()
