# SPDX-License-Identifier: Apache-2.0
"""Before a hospital joins: would its policy let the job run, and what would leave. Nothing is trained or sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import medpfl
from medpfl import store
from medpfl.core.errors import PolicyRefused
from medpfl.core.tied import own_state
from medpfl.data.policy import Policy
from medpfl.data.samples import SiteData
from medpfl.data.site_file import SiteFile
from medpfl.deployed.evaluate import write_text
from medpfl.job import EvaluationJob, Job
from medpfl.methods.contract import Build
from medpfl.methods.references import riding_along
from medpfl.rounds.held_alike import read_common
from medpfl.rounds.hospital import policy, withholding
from medpfl.rounds.hospital.networks import Networks
from medpfl.rounds.leaves import Leaving, Size, leaves_of
from medpfl.rounds.messages import byte_count
from medpfl.tasks.contract import Task


def check_policy(
    job: Job | EvaluationJob, site: SiteFile, hospitals: int | None = None
) -> tuple[SiteData, dict[str, Size]]:
    """Whether the job keeps to the hospital's policy on the hospital's data, which are read. How many hospitals take
    part, and through which filters the answers go, is seen when it runs.

    Returns:
        The hospital's data; slot to the size of its tensors, empty where there are none, or where the network is
        planned when the job starts.

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
        return data, {}
    policy.check_data(site.policy, data, methods)
    roster = (site.site or "this one", *(f"another {number}" for number in range(1, hospitals or job.min_clients)))
    return data, {} if task.to_be_planned else _sizes(job, site, task.informed(data), data, roster)


def _sizes(job: Job, site: SiteFile, task: Task, data: SiteData, roster: tuple[str, ...]) -> dict[str, Size]:
    """Slot to the size of its tensors, of the networks as the job starts with them at the first of the roster."""
    name = roster[0]
    methods = [one.at(name) for one in (job.method, *riding_along(job.mixers, job.method))]
    common = read_common(methods[0], task, site, data.input_shape, data)
    build = Build(task, data, roster, job.settings.seed, name, common.public, common.start(methods[0].start))
    served = {slot: mixer.travels for slot, mixer in job.mixers.items()}
    with policy.building(site.policy):
        networks = Networks(methods, build, served, torch.device("cpu"))
    policy.check_networks(site.policy, own_state(networks.models))
    return {
        slot: Size({key: tuple(t.shape) for key, t in state.items()}, byte_count({slot: state}))
        for slot, state in networks.gather().items()
    }


@dataclass(frozen=True)
class Judged:
    """A line of what leaves, at one hospital; ``refused``: the sentence of the policy that keeps it here, or "".
    ``size``: of tensors, in words; ``shapes``: theirs."""

    when: str
    what: str
    meaning: str
    often: str
    shown: str
    size: str
    shapes: Mapping[str, tuple[int, ...]]
    bytes: int | None
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
    withholding.check_known(site.policy)
    whole, statistic = "", ""
    sizes: dict[str, Size] = {}
    try:
        data, sizes = check_policy(job, site, hospitals)
        try:
            policy.check_statistic(site.policy, len(data.splits["train"]))
        except PolicyRefused as error:
            statistic = str(error)
        if hospitals is not None:
            policy.check_hospitals(site.policy, hospitals)
    except PolicyRefused as error:
        whole = str(error)
    listed = leaves_of(job, hospitals, sizes)
    return Prospect(
        job=job.name,
        method=_name(job.method),
        task=_name(job.task),
        hospital=site.site or "",
        dataset=job.task.dataset,
        policy=tuple(site.policy.described()),
        lines=tuple(_judged(line, whole or _without(site.policy, listed), statistic, site.policy) for line in listed),
        afterwards=tuple(_afterwards(site, hospitals)),
    )


def _without(rules: Policy, listed: Sequence[Leaving]) -> str:
    """The rule by which the hospital takes no part, for what it keeps here cannot be missing; "" if it can."""
    told = (withholding.refused(rules, line.when, line.what) for line in listed if not withholding.can_lack(line.what))
    return next(filter(None, told), "")


def _judged(line: Leaving, whole: str, statistic: str, rules: Policy) -> Judged:
    kept = withholding.refused(rules, line.when, line.what)
    return Judged(
        **{one.name: getattr(line, one.name) for one in fields(line) if one.name != "size"},
        size=str(line.size or ""),
        shapes=line.size.shapes if line.size else {},
        bytes=line.size.bytes if line.size else None,
        refused=whole or kept or (statistic if line.when == "statistics" else ""),
    )


def _afterwards(site: SiteFile, hospitals: int | None) -> Sequence[str]:
    rules = site.policy
    found = [] if hospitals else [f"whether at least {rules.least_hospitals} hospitals take part"]
    found += [f"whether everything goes through the filter {name}" for name in rules.filters]
    return [*found, f"whether every update was learnt from at least {rules.least_update} different samples"]


def _name(component: object) -> str:
    return f"{type(component).__module__}.{type(component).__qualname__}"


def as_table(found: Prospect) -> str:
    """As Markdown, with the hospital's word on every line."""
    columns = ("asked to", "what", "what it is", "how often", "who sees it", "size", "here")
    cells = [
        (one.when, one.what, one.meaning, one.often, one.shown, one.size, one.refused or "leaves")
        for one in found.lines
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *cells))


def write_page(found: Prospect, path: Path) -> None:
    """One self-contained page, for the file of processing activities.

    Raises:
        MedPFLError: it cannot be written.
    """
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(loader=PackageLoader("medpfl.rounds.hospital", "."), autoescape=select_autoescape())
    write_text(path, environment.get_template("before.html").render(found=found))
