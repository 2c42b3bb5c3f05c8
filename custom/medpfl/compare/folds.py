# SPDX-License-Identifier: Apache-2.0
"""Leave one hospital out: the job without it, and what is left serves its patients. One run a hospital and seed.

``python -m medpfl.compare.folds FOLDER`` does one run, like ``medpfl.compare.worker``.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import medpfl
from medpfl.compare.data import split_digest
from medpfl.compare.entries import build_codecs
from medpfl.compare.orders import FoldOrder
from medpfl.compare.run_results import FoldRun
from medpfl.compare.unseen import served
from medpfl.compare.worker import carry_out, check_code
from medpfl.component import build, class_paths, spec_of
from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer
from medpfl.core.sources import look_again, source_digest
from medpfl.data.samples import SiteData
from medpfl.data.site_file import SiteFile, load_site_file
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.results.files import json_of, read_training
from medpfl.rounds.held_alike import read_common
from medpfl.rounds.protocol.bounded import as_json
from medpfl.rounds.simulate import simulate
from medpfl.tasks.contract import Task


@dataclass(frozen=True)
class Fold:
    """One run: ``without`` takes no part and is tested. The rest as ``medpfl.compare.runner`` takes it."""

    without: str
    seed: int
    digest: str
    order: FoldOrder


@dataclass(frozen=True)
class Folds:
    """All runs of a leave-one-out."""

    job: Job
    site_files: dict[str, Path]
    runs: list[Fold]


def make_folds(job: Job, site_files: dict[str, Path], seeds: int) -> Folds:
    """Every hospital left out in turn, with ``seeds`` seeds from the job's own on. The references are always trained;
    hospitals with different networks have no FedAvg.

    Raises:
        ConfigError: fewer than 3 hospitals, the job cannot run with one less, or has filters that FLARE alone applies.
        MedPFLError: a site file or the data are wrong.
    """
    look_again()
    if len(site_files) < 3:
        raise ConfigError(f"leaving one out needs at least 3 hospitals, got {len(site_files)}: {', '.join(site_files)}")
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    if job.filters:
        raise ConfigError(
            f"job '{job.name}' has filters that FLARE alone can apply ({', '.join(job.filters)}), and leaving one out "
            "does not use FLARE: take a copy of the job without them"
        )
    references = ("local",) if job.task.networks_differ else ("local", "fedavg")
    settings = dataclasses.replace(job.settings, references=references, finetune=0)
    job = dataclasses.replace(job, settings=settings)
    roster = sorted(site_files)
    splits, held = {}, {}
    for site in roster:
        rest = tuple(other for other in roster if other != site)
        for mixer in job.mixers.values():
            try:
                mixer.check(rest)
            except ConfigError as error:
                raise ConfigError(f"without {site}: {error}") from error
        site_file = load_site_file(site_files[site], site)
        data = job.task.load(site_file)
        for split in ("validation", "test"):
            if not len(data.splits[split]):
                raise ConfigError(f"{site} has no {split} samples; leaving one out needs them at every hospital")
        splits[site] = split_digest(data)
        held[site] = _marks(job.method.at(site), job.task, site_file, data)
    # All that are left must answer, unless a round asks only some of them.
    least = len(roster) - 1 if settings.hospitals_per_round is None else min(job.min_clients, len(roster) - 1)
    runs = []
    for seed in range(job.settings.seed, job.settings.seed + seeds):
        settings = dataclasses.replace(job.settings, seed=seed)
        for site in roster:
            order = FoldOrder(
                job=job.name,
                without=site,
                settings=as_json(dataclasses.asdict(settings)),
                components={slot: as_json(spec_of(mixer)) for slot, mixer in job.components.items()},
                method=as_json(spec_of(job.method)),
                task=as_json(spec_of(job.task)),
                splits=splits,
                codecs=as_json(spec_of(job.codecs)["args"]) if job.codecs else None,
                min_clients=least,
            )
            code = _code_of(order)
            digest = digest_of([json_of(order), held, medpfl.__version__, str(torch.__version__), code])
            runs.append(Fold(site, seed, digest, order.model_copy(update={"held": held, "code": code})))
    return Folds(job, dict(site_files), runs)


def _marks(method: Method, task: Task, site_file: SiteFile, data: SiteData) -> dict[str, str]:
    """Of what a run uses of a site file beside the data: checkpoints, public data, a network of the hospital's own."""
    marks = read_common(method, task, site_file, data.input_shape).marks()
    chosen = task.chosen(site_file)
    if chosen is not task:
        spec = as_json(spec_of(chosen))
        code = source_digest({path.rpartition(".")[0] for path in class_paths(spec)})
        marks["network"] = digest_of([spec, code])
    return marks


def _code_of(order: FoldOrder) -> str:
    named = {path.rpartition(".")[0] for path in class_paths(order.configurations())}
    return source_digest({"medpfl.rounds.simulate", "medpfl.compare.unseen", *named})


def run(order: FoldOrder, folder: Path) -> FoldRun:
    """Train without the hospital, then test on it; what run.json holds.

    Raises:
        MedPFLError: as the hospitals and the server raise them, or the data changed meanwhile.
    """
    task: Task = build(order.task, Task, "task")
    files = {site: Path(path) for site, path in order.site_files.items()}
    without = order.without
    method: Method = build(order.method, Method, "method")
    check_code(order, _code_of(order))
    for site, path in files.items():
        site_file = load_site_file(path, site)
        found = task.load(site_file)
        if split_digest(found) != order.splits[site]:
            raise ConfigError(f"{site}'s data or split changed while the folds were running; start them again")
        if _marks(method.at(site), task, site_file, found) != order.held[site]:
            raise ConfigError(
                f"{site}'s network, checkpoints or public data changed while the folds were running; start them again"
            )
        if site == without:
            unseen = found
    there = {site: path for site, path in files.items() if site != without}
    components = {slot: build(spec, Mixer, f"slot '{slot}'") for slot, spec in order.components.items()}
    settings = Settings(**order.settings)  # type: ignore[arg-type]  # it checks them itself
    codecs = build_codecs(order.codecs, "codecs") if order.codecs else None
    job = Job(order.job, order.min_clients, settings, components, method, task, codecs)
    simulate(job, there, folder / "results", folder / "home")
    summary = read_training(folder / "results")
    return FoldRun(
        without=without,
        seed=settings.seed,
        score=summary.score,
        measure=summary.measure(summary.score),
        cases=len(unseen.splits["test"].names),
        rows=served(folder / "results", folder / "home", there, unseen, choice="last"),
        events=summary.events,
    )


def main(folder: Path) -> int:
    """``carry_out`` a run of a leave-one-out."""
    return carry_out(folder, FoldOrder, run)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
