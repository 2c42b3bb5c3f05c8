# SPDX-License-Identifier: Apache-2.0
"""A job's numbers in Weights & Biases: a group a job, and in it a run for each hospital, the mean and the server."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from medpfl.core.errors import MedPFLError
from medpfl.core.extras import require
from medpfl.results.callbacks import Callback, Failure, JobBegin, JobEnd, RoundEnd
from medpfl.results.files import read_lines, read_summary
from medpfl.results.schema import Line
from medpfl.results.trackers.scalars import scalars

if TYPE_CHECKING:
    from wandb import Run

MODE = "WANDB_MODE"
"""W&B's own environment variable, of whoever runs the server: "online" sends; a job cannot."""
_QUIET = {
    "silent": True, "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
    "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True,
}  # fmt: skip
"""W&B would also keep the console's text, the checkout's state, the machine and its load."""


class WandbRuns:
    """Writes numbers into new runs of ``project``, group ``job``, below ``folder``/wandb.

    Raises:
        MedPFLError: wandb is not installed.
    """

    def __init__(self, folder: Path, project: str, job: str):
        require("wandb", "wandb", "writing for Weights & Biases")
        self.folder, self.project, self.job = folder, project, job
        self._runs: dict[str, Run] = {}

    def write(self, lines: Iterable[Line]) -> None:
        """Write the lines' numbers; their x-axis is ``round``, the round that each line names.

        Raises:
            MedPFLError: W&B does not take them.
        """
        import wandb

        found = sorted(scalars(lines), key=lambda one: (one.site, one.round))
        try:
            for (site, number), numbers in groupby(found, key=lambda one: (one.site, one.round)):
                self._run(site).log({"round": number, **{one.name: one.value for one in numbers}})
        except (wandb.Error, OSError) as error:
            raise MedPFLError(f"Weights & Biases did not take the numbers: {error}") from error

    def close(self, failed: bool = False) -> None:
        """End the runs, and W&B's own process, unless the caller has another run open.

        That process writes a run's last lines after ``finish`` has returned; its end waits for them.
        """
        import wandb

        for run in self._runs.values():
            run.finish(exit_code=int(failed))
        self._runs.clear()
        if wandb.run is None:
            wandb.teardown()

    def _run(self, site: str) -> "Run":
        import wandb

        if site not in self._runs:
            run = wandb.init(
                project=self.project,
                group=self.job,
                name=f"{self.job} {site}",
                config={"job": self.job, "site": site},
                dir=str(self.folder),
                mode="online" if os.environ.get(MODE) == "online" else "offline",
                reinit="create_new",  # several at a time
                settings=wandb.Settings(**_QUIET),
            )
            run.define_metric("*", step_metric="round")  # tests name rounds that are over
            self._runs[site] = run
        return self._runs[site]


@dataclass(frozen=True)
class WeightsAndBiases(Callback):
    """Writes ``wandb/`` into the results folder, or sends where the server's WANDB_MODE is "online".

    A resumed job writes all rounds, those before too, into runs of its own.

    Attributes:
        experiment: W&B's project; None: the job's name.
    """

    experiment: str | None = None
    _runs: list[WandbRuns] = field(default_factory=list, init=False, repr=False, compare=False)

    def on_job_begin(self, begin: JobBegin) -> None:
        self._runs[:] = [WandbRuns(begin.results, self.experiment or begin.job, begin.job)]

    def on_round_end(self, end: RoundEnd) -> None:
        self._write(end.lines)

    def on_job_end(self, end: JobEnd) -> None:
        self._write(end.lines, ended=True)

    def on_failure(self, failure: Failure) -> None:
        self._write(failure.lines, ended=True, failed=True)

    def _write(self, lines: tuple[Line, ...], ended: bool = False, failed: bool = False) -> None:
        for runs in self._runs:
            runs.write(lines)
            if ended:
                runs.close(failed)


def write_wandb(results: Path, folder: Path) -> None:
    """A finished results folder's numbers as runs below ``folder``/wandb, sent where WANDB_MODE is "online".

    Raises:
        MedPFLError: as ``read_lines``, ``read_summary`` and ``WandbRuns``; or the folder cannot be written.
    """
    job, lines = read_summary(results).job, read_lines(results)
    runs = WandbRuns(folder, job, job)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # W&B would silently take another
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
    runs.write(lines)
    runs.close()
