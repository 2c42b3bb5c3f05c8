# SPDX-License-Identifier: Apache-2.0
"""``medpfl compare --flare``: a comparison's runs as jobs on one POC federation, one after the other.

Results and models come from the federation into the run's folder, and the same worker makes the same files of them as
of a run in process. All hospitals are on this machine, so tables that need every model at one place are there too.
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from medpfl.compare.plan import Plan
from medpfl.compare.processes import run_in_process
from medpfl.compare.runner import finished, locked, part_of, write_order
from medpfl.compare.runs import Run, job_of, rebuild
from medpfl.component import class_paths
from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError, MedPFLError, reason_of
from medpfl.flare.allow import component_classes
from medpfl.flare.federation import LocalFederation
from medpfl.flare.poc import Federation
from medpfl.job import write_job


def over_flare(plan: Plan) -> Plan:
    """The same runs under digests of their own: a run over FLARE is not taken for one in process.

    Raises:
        ConfigError: the file asks for what is done in process only.
    """
    for key in ("pooled", "splits", "unseen", "tuning"):
        if getattr(plan.file, key):
            raise ConfigError(f"--flare: '{key}' of the comparison file is for runs in process only; leave it out")
    runs = [dataclasses.replace(run, digest=digest_of([run.digest, "FLARE"])) for run in plan.runs]
    return dataclasses.replace(plan, runs=runs)


def do_runs_over_flare(
    plan: Plan, results: Path, timeout: float, tell: Callable[[Run, str | None], None], tick: Callable[[int], None]
) -> dict[str, str]:
    """Do what is not done yet, with a federation of its own; the arguments and the answer are those of ``do_runs``.

    Args:
        timeout: seconds a run may take.

    Raises:
        MedPFLError: the federation did not start, the folder cannot be written, or another comparison is using it.
    """
    if all(finished(results, run) for run in plan.runs):
        return {}
    folder = next(iter(plan.site_files.values())).parent
    with Federation(folder, list(plan.site_files), classes=foreign_classes(plan)) as federation:
        return do_runs_on(federation, plan, results, timeout, tell, tick)


def do_runs_on(
    federation: LocalFederation,
    plan: Plan,
    results: Path,
    timeout: float,
    tell: Callable[[Run, str | None], None],
    tick: Callable[[int], None],
) -> dict[str, str]:
    """The same on a federation that is up, which allows the plan's classes."""
    failures: dict[str, str] = {}
    with locked(results):
        for run in {run.digest: run for run in plan.runs if not finished(results, run)}.values():
            reason = _one(run, plan, results, timeout, federation, tick)
            if reason:
                failures[run.digest] = reason
            tell(run, reason)
            tick(0)
    return failures


def foreign_classes(plan: Plan) -> list[str]:
    """What sites must allow beyond this package's own components."""
    named = {path for run in plan.runs for path in class_paths(run.order.configurations())}
    return sorted(named - set(component_classes()))


def _one(
    run: Run, plan: Plan, results: Path, timeout: float, federation: LocalFederation, tick: Callable[[int], None]
) -> str | None:
    """Submit the run's job, bring its results here, and let the worker finish it; returns why it failed, or None."""
    part = part_of(results, run)
    shutil.rmtree(part, ignore_errors=True)  # the federation that began it is gone
    order = run.order
    entry, task = rebuild(order)
    job = job_of(entry, task, order, len(plan.site_files))
    try:
        job_id = federation.submit(write_job(job, part / "job" / job.name))
        live = federation.run_folder("server", job_id) / "results" / "metrics.jsonl"
        federation.follow(job_id, f"its job on FLARE ({job_id})", timeout, lambda: tick(_rounds(live)))
        shutil.copytree(federation.download(job_id), part / "results")
        for site in federation.sites:
            models = federation.models(site, job.name)
            if not models.is_dir():
                return f"{site} has no models of it: it was not there when its job on FLARE ({job_id}) ended"
            shutil.copytree(models, part / "home" / site / job.name / "models")
    except MedPFLError as error:
        return str(error)
    except OSError as error:
        return f"what its job on FLARE left cannot be copied to {part}: {reason_of(error)}"
    finally:
        for name in ("server", *federation.sites):  # the next run's job has the same name
            shutil.rmtree(federation.models(name, job.name).parent, ignore_errors=True)
    return run_in_process(run.order.worker, str(write_order(run, plan, results, trained=True).resolve()))


def _rounds(live: Path) -> int:
    try:
        return live.read_text(encoding="utf-8").count('"split": "round"')
    except OSError:  # not begun, or over and removed
        return 0
