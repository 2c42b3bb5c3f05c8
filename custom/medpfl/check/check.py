# SPDX-License-Identifier: Apache-2.0
"""The data check as a whole: datasets, a job if one is named, and the verdict."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medpfl.check.findings import too_few_to_score
from medpfl.check.grouping import grouped
from medpfl.check.inspection import Inspection
from medpfl.check.owners import unnamed_owners
from medpfl.check.reading import inspect
from medpfl.check.trial import Trial, try_job
from medpfl.core.errors import SiteFileError
from medpfl.data.schema import Schema
from medpfl.data.site_file import load_site_file
from medpfl.tasks.contract import Task

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much."""


@dataclass(frozen=True)
class Report:
    """What a data check found.

    Attributes:
        site: the hospital's name, if it is known.
        memory_gb: the site file's storage.memory_gb.
        inspections: one a dataset; with a job, only the one it uses.
        trial: how the job went, if one was named.
    """

    path: Path
    site: str | None
    memory_gb: float
    inspections: list[Inspection]
    trial: Trial | None = None

    @property
    def problems(self) -> list[str]:
        """Of all datasets, those of one cause once; the inspections have every one, and the job's failure is told
        apart."""
        return [problem for inspection in self.inspections for problem in grouped(inspection.problems)]

    @property
    def warnings(self) -> list[str]:
        found = [warning for inspection in self.inspections for warning in inspection.warnings]
        return [*found, *(self.trial.warnings if self.trial else ())]

    @property
    def passed(self) -> bool:
        """No problem, and the job can run; warnings do not count."""
        return not self.problems and not (self.trial and self.trial.failure)

    @property
    def verdict(self) -> str:
        """One sentence."""
        count = len(self.problems)
        found = f"{count} problem{'s' * (count != 1)} in the data" if count else "no problem in the data"
        if self.trial is None:
            return (
                f"These data can be used: {found}." if self.passed else f"These data should not be used yet: {found}."
            )
        if self.trial.failure:
            return f"The job {self.trial.job} cannot run here: {self.trial.failure.rstrip('.')}."
        if count:
            return f"The job {self.trial.job} would run here, but its results could not be trusted: {found}."
        return f"The job {self.trial.job} can run here: {found}."


def check_data(
    path: Path, site: str | None, job: tuple[str, Task] | None, progress: Progress, schema: Schema | None = None
) -> Report:
    """Inspect a site file's datasets, or the one that a job uses, and try the job.

    Args:
        path: the site file, or a folder that holds ``<site>.yaml``.
        job: its name and its task.
        schema: what one of the datasets must follow.

    Raises:
        SiteFileError: the site file cannot be used, or does not declare the schema's dataset.
    """
    site_file = load_site_file(path, site)
    if schema and schema.dataset not in site_file.datasets:
        raise SiteFileError(
            f"{path}: it does not declare the schema's dataset '{schema.dataset}'; "
            f"declared: {', '.join(sorted(site_file.datasets))}"
        )
    names = list(site_file.datasets) if job is None else [name for name in site_file.datasets if name == job[1].dataset]
    inspections = []
    for name in names:
        advance = _of(progress, f"reading {name}")
        inspections.append(inspect(name, site_file.datasets[name], advance))
        if not site_file.datasets[name].public:  # of which nothing is scored
            inspections[-1].warnings += unnamed_owners(name, site_file.datasets[name])
            inspections[-1].warnings += too_few_to_score(inspections[-1], site_file.policy.least_scored)
        if schema and schema.dataset == name:
            inspections[-1].problems[:0] = [
                f"{name}: {told}" for told in schema.differences(site_file.datasets[name], site_file.site or site)
            ]
    trial = None
    if job:
        progress(f"preparing the data for {job[0]}", 0, 1)
        anew = load_site_file(path, site)  # what was inspected has left out what is wrong
        trial = try_job(*job, anew, site_file.site or site, inspections[0].splits if inspections else None)
        progress(f"preparing the data for {job[0]}", 1, 1)
    return Report(site_file._path, site_file.site or site, site_file.storage.memory_gb, inspections, trial)


def _of(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, count: progress(what, done, count)
