# SPDX-License-Identifier: Apache-2.0
"""Do a plan's runs, several at a time, each in a process of its own; a finished run is never repeated."""

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from medpfl.compare.cluster import cluster_of, ended, outcome
from medpfl.compare.orders import Handed
from medpfl.compare.processes import FAILURE, RESULT
from medpfl.compare.run_results import FoldRun, SearchRun, TrainedRun, UnseenRun
from medpfl.compare.worker import ORDER, PROGRESS
from medpfl.core.errors import MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.results.files import json_of, parse


class Run(Protocol):
    """``digest``: over everything that the result depends on; ``order``: what the worker is told."""

    @property
    def digest(self) -> str: ...
    @property
    def order(self) -> Handed: ...


R = TypeVar("R", bound=Run, covariant=True)
_PAUSE = 0.2  # seconds
K = TypeVar("K", SearchRun, TrainedRun, UnseenRun, FoldRun)


class Plan(Protocol[R]):
    """``runs``: those wanted; ``site_files``: of all hospitals."""

    @property
    def runs(self) -> Sequence[R]: ...
    @property
    def site_files(self) -> dict[str, Path]: ...


def do_runs(
    plan: Plan[R],
    results: Path,
    jobs: int,
    tell: Callable[[R, str | None], None],
    tick: Callable[[int], None],
    scheduler: str | None = None,
) -> dict[str, str]:
    """Do what is not done yet.

    Args:
        results: the comparison's folder; runs are kept under ``runs/<digest>/``.
        jobs: how many at a time on this machine, >= 1.
        tell: called with each run that ends and, where it failed, why.
        tick: called now and then with the number of rounds done in the runs that are not finished.
        scheduler: address of a Dask scheduler whose workers do the runs; None: this machine.

    Returns:
        Why each failed run failed, by digest.

    Raises:
        MedPFLError: the folder cannot be written, another comparison is using it, or no scheduler answers.
    """
    # Two entries that compute the same share one run.
    unique = {run.digest: run for run in plan.runs if not finished(results, run)}
    failures: dict[str, str] = {}
    if not unique:
        return failures
    with locked(results), cluster_of(jobs, scheduler) as cluster:
        waiting = {
            cluster.submit(run.order.worker, str(write_order(run, plan, results).resolve())): run
            for run in unique.values()
        }
        while waiting:
            for future in [future for future in waiting if ended(future)]:
                run, reason = waiting.pop(future), outcome(future)
                if reason:
                    failures[run.digest] = reason
                tell(run, reason)
            tick(sum(_rounds(results, run) for run in waiting.values()))
            if waiting:
                time.sleep(_PAUSE)
    return failures


def finished(results: Path, run: Run) -> bool:
    """Whether the run's results are there, whole."""
    return (results / "runs" / run.digest / RESULT).is_file()


def read_run(results: Path, run: Run, kind: type[K]) -> K:
    """What a finished run left.

    Args:
        kind: what such runs leave.

    Raises:
        MedPFLError: it cannot be read.
    """
    path = results / "runs" / run.digest / RESULT
    try:
        return parse(TypeAdapter(kind), path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise MedPFLError(f"cannot read {path}: {error}; remove its folder to repeat that run") from error
    except MedPFLError as error:
        raise MedPFLError(f"{error}; remove its folder to repeat that run") from error


def part_of(results: Path, run: Run) -> Path:
    """Where an unfinished run lies."""
    return results / "runs" / f"{run.digest}.part"


def write_order(run: Run, plan: Plan[Any], results: Path, trained: bool = False) -> Path:
    """Write what the run's process is told; returns the run's folder.

    Args:
        trained: the run's results and models are in its folder already, from FLARE.

    Raises:
        MedPFLError: it cannot be written, or a site file has a name that could not be read back from JSON.
    """
    part = part_of(results, run)
    site_files = {site: str(path.resolve()) for site, path in plan.site_files.items()}
    for path in site_files.values():
        if (readable := path.encode("utf-8", "backslashreplace").decode()) != path:
            why = "has a name that is not in UTF-8; rename it, or its folder (convmv -f latin1 -t utf8)"
            raise MedPFLError(f"the site file {readable} {why}")
    order = run.order.model_copy(update={"trained": trained, "site_files": site_files})
    write_text(part / ORDER, json.dumps(json_of(order), indent=1))
    (part / FAILURE).unlink(missing_ok=True)
    return part


def _rounds(results: Path, run: Run) -> int:
    """How many rounds an unfinished run has done."""
    try:
        text = (part_of(results, run) / PROGRESS).read_text(encoding="utf-8")
    except OSError:
        return 0
    return text.count('"split": "round"')


@contextlib.contextmanager
def locked(results: Path) -> Iterator[None]:
    """Only one comparison at a time writes into a folder."""
    try:
        (results / "runs").mkdir(parents=True, exist_ok=True)
        lock = open(results / "runs" / ".lock", "w", encoding="utf-8")  # noqa: SIM115 (held while it runs)
    except OSError as error:
        raise MedPFLError(f"cannot write into {results}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MedPFLError(f"another comparison is running in {results}; wait for it or name another -o") from error
        yield
