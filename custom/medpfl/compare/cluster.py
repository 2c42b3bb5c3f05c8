# SPDX-License-Identifier: Apache-2.0
"""Where a comparison's runs are done: Dask's threads in this process, or a Dask cluster of the user's own.

In either case a run is a process of its own that reads its order from the comparison's folder and leaves its results
there: between the machines of a cluster only paths and sentences travel. Dask unpickles what its own processes send
each other, so a cluster belongs to one user; nothing else of this package speaks to one. Dask's threads in this process
open no port for that; the one of its pages, which are left out, is bound to this machine.
"""

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from medpfl.compare.processes import beginning, run_in_process
from medpfl.core.errors import MedPFLError
from medpfl.core.extras import require
from medpfl.core.temporary import temporary_folder

if TYPE_CHECKING:
    from distributed import Client, Future

GPU = "GPU"
"""The resource of which a run takes one, where a cluster's workers declare it."""
_WAIT = 15.0  # seconds for a scheduler to answer
_HERE = "127.0.0.1:0"
_OURS: dict[str, list[str] | None] = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # A machine that slept for minutes has the worker in this process still; Dask would drop it, and wait for another.
    "distributed.scheduler.worker-ttl": None,
}


class Cluster:
    """What runs are given to."""

    def __init__(self, client: "Client", resources: dict[str, int]):
        self._client, self._resources = client, resources

    def submit(self, module: str, part: str) -> "Future[str | None]":
        """Have the run of the folder ``part`` done by ``python -m module``.

        The folder is the key: of two comparisons that have a run in common, each has it done into its own.
        """
        return self._client.submit(
            run_in_process, module, part, key=f"medpfl {part}", pure=False, resources=self._resources
        )


@contextlib.contextmanager
def cluster_of(jobs: int, scheduler: str | None) -> Iterator[Cluster]:
    """Runs that have begun are ended if it is left by an exception, here; a cluster's workers end theirs.

    Args:
        jobs: runs at a time on this machine, >= 1; a cluster's workers have their own number.
        scheduler: address of a Dask scheduler, as tcp://host:8786 or tls://host:8786; None: this process.

    Raises:
        MedPFLError: nobody answers there, or Dask's distributed is not installed.
    """
    require("distributed", "compare", "a comparison")
    import dask
    from distributed import Client, LocalCluster
    from distributed.comm.addressing import get_address_host_port

    with contextlib.ExitStack() as stack:
        if scheduler is None:
            stack.enter_context(dask.config.set(_OURS))
            scratch = str(stack.enter_context(temporary_folder("medpfl-dask-")))
            local = LocalCluster(  # type: ignore[no-untyped-call]
                n_workers=1, threads_per_worker=jobs, processes=False, protocol="inproc", dashboard_address=_HERE,
                worker_dashboard_address=_HERE, memory_limit=0, local_directory=scratch, silence_logs=logging.ERROR,
            )  # fmt: skip
            stack.enter_context(local)
            client = Client(local, set_as_default=False)  # type: ignore[no-untyped-call]
        else:
            try:
                get_address_host_port(scheduler)  # a client that cannot read its address waits for itself to close
                client = Client(scheduler, timeout=_WAIT, set_as_default=False)  # type: ignore[no-untyped-call]
            except (OSError, ValueError) as error:
                raise MedPFLError(f"--scheduler: no Dask scheduler answers at {scheduler}: {error}") from error
        stack.enter_context(client)
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        gpus = any(GPU in worker["resources"] for worker in workers)
        with beginning():
            yield Cluster(client, {GPU: 1} if gpus else {})


def ended(future: "Future[str | None]") -> bool:
    return bool(future.done())  # type: ignore[no-untyped-call]


def outcome(future: "Future[str | None]") -> str | None:
    """Why a run that has ended failed, or None."""
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker as error:
        times = error.allowed_failures + 1
        last = error.last_worker.address
        return f"{times} workers of the cluster died while they did it, the last one {last} (out of memory?)"
    except CancelledError:
        return "the connection to the Dask scheduler was lost; start the comparison again, finished runs are kept"
