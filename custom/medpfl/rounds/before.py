# SPDX-License-Identifier: Apache-2.0
"""Before a hospital joins: would its policy let the job run, and what would leave. Nothing is trained or sent."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import medpfl
from medpfl import store
from medpfl.core.errors import PolicyRefused
from medpfl.data.samples import SiteData
from medpfl.data.site_file import SiteFile
from medpfl.deployed.evaluate import write_text
from medpfl.job import EvaluationJob, Job
from medpfl.methods.references import riding_along
from medpfl.rounds import policy
from medpfl.rounds.leaves import Leaving, leaves_of


def check_policy(job: Job | EvaluationJob, site: SiteFile) -> SiteData:
    """Whether the job keeps to the hospital's policy on the hospital's data, which are read. How many hospitals take
    part, and through which filters the answers go, is seen when it runs.

    Raises:
        PolicyRefused: it does not, with the rule's key.
        MedPFLError: the data cannot be read, or the job names what the site file does not declare.
    """
    methods = [job.method, *(riding_along(job.mixers, job.method) if isinstance(job, Job) else ())]
    policy.check_classes(site.policy, methods, job.task, site.policy.filters)
    policy.check_threads(site.policy, job.settings.threads)
    if isinstance(job, Job):
        policy.check_length(site.policy, job.settings.rounds, job.settings.finetune)
        policy.check_encrypted(site.policy, job.settings.encryption)
        for name in job.method.public_datasets():
            site.check_public(name)
    task = (job.task.at(site.site) if site.site else job.task).chosen(site)
    data = task.load(site)
    if isinstance(job, EvaluationJob):
        policy.check_networks(site.policy, store.read(job.model)[0])
    else:
        policy.check_data(site.policy, data, methods)
        if not task.to_be_planned:
            with policy.building(site.policy):
                task.network(data)
    return data


@dataclass(frozen=True)
class Judged:
    """A line of what leaves, at one hospital; ``refused``: the sentence of the policy that keeps it here, or ""."""

    when: str
    what: str
    meaning: str
    refused: str


@dataclass(frozen=True)
class Prospect:
    """What a hospital would do in a job.

    Attributes:
        hospital: its name in the site file, or "".
        dataset: the one that the job reads.
        policy: the hospital's, rule by rule.
        lines: what leaves, and what the policy keeps here.
        afterwards: what is decided only when the job runs.
    """

    job: str
    method: str
    task: str
    hospital: str
    dataset: str
    policy: tuple[str, ...]
    lines: tuple[Judged, ...]
    afterwards: tuple[str, ...]
    medpfl: str = medpfl.__version__

    @property
    def refused(self) -> int:
        """How many lines do not leave."""
        return sum(bool(line.refused) for line in self.lines)


def prospect(job: Job | EvaluationJob, site: SiteFile, hospitals: int | None = None) -> Prospect:
    """Everything that the job asks for, line by line, and which of it the hospital refuses.

    Args:
        site: its data are read, as when the job starts.
        hospitals: how many there are in the federation; None: any number.

    Raises:
        MedPFLError: the data cannot be read, or the job names what the site file does not declare.
    """
    whole, statistic = "", ""
    try:
        data = check_policy(job, site)
        try:
            policy.check_statistic(site.policy, len(data.splits["train"]))
        except PolicyRefused as error:
            statistic = str(error)
        if hospitals is not None:
            policy.check_hospitals(site.policy, hospitals)
    except PolicyRefused as error:
        whole = str(error)
    return Prospect(
        job=job.name,
        method=_name(job.method),
        task=_name(job.task),
        hospital=site.site or "",
        dataset=job.task.dataset,
        policy=tuple(site.policy.described()),
        lines=tuple(_judged(line, whole, statistic) for line in leaves_of(job, hospitals)),
        afterwards=tuple(_afterwards(site, hospitals)),
    )


def _judged(line: Leaving, whole: str, statistic: str) -> Judged:
    return Judged(**asdict(line), refused=whole or (statistic if line.when == "statistics" else ""))


def _afterwards(site: SiteFile, hospitals: int | None) -> Sequence[str]:
    rules = site.policy
    found = [] if hospitals else [f"whether at least {rules.least_hospitals} hospitals take part"]
    found += [f"whether everything goes through the filter {name}" for name in rules.filters]
    return [*found, f"whether every update was learnt from at least {rules.least_update} different samples"]


def _name(component: object) -> str:
    return f"{type(component).__module__}.{type(component).__qualname__}"


def as_table(found: Prospect) -> str:
    """As Markdown, with the hospital's word on every line."""
    rows = [f"| {one.when} | {one.what} | {one.meaning} | {one.refused or 'leaves'} |" for one in found.lines]
    return "\n".join(["| asked to | what | what it is | here |", "|---|---|---|---|", *rows])


def write_page(found: Prospect, path: Path) -> None:
    """One self-contained page, for the file of processing activities.

    Raises:
        MedPFLError: it cannot be written.
    """
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(loader=PackageLoader("medpfl.rounds", "."), autoescape=select_autoescape())
    write_text(path, environment.get_template("before.html").render(found=found))
