# SPDX-License-Identifier: Apache-2.0
"""What FLARE 2.9 does not do when a process dies: a hospital's job process that was killed is started again, and a
server that starts again closes the jobs that it ran when it ended. ``medpfl site allow`` puts both into a kit.

FLARE 2.9 ends a whole job when one hospital's job process is killed, by the system for want of memory, say. Here the
hospital's own daemon starts it again from its state on disk, and the server sees a hospital that answers late; one that
is killed again and again leaves the job (``flare.failures``).
"""

import logging
import os
import shlex
import signal
import threading
from collections.abc import Callable
from typing import Literal

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.utils.job_launcher_utils import add_custom_dir_to_path, get_credential_env
from nvflare.utils.process_utils import ProcessAdapter, spawn_process

from medpfl.flare.kit_files import Component, Json, Resources

RESTARTS = 3
"""How often a hospital's job process is started again in one job; then the job goes on without this hospital."""
_PAUSE = 1.0
_KILLED = {
    -number
    for number in (
        signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGTERM, signal.SIGHUP, signal.SIGINT,
    )
}  # fmt: skip
"""By FLARE itself a job's process is ended by ``terminate`` alone."""


class SupervisedHandle(ProcessHandle):
    """A job process that is started again when it was killed; FLARE waits for it as for one process.

    Args:
        start: starts the process.
        restarts: how often it is started again.
    """

    def __init__(self, start: Callable[[], ProcessAdapter], restarts: int = RESTARTS):
        self.adapter: ProcessAdapter = start()
        super().__init__(process_adapter=self.adapter)
        self._start, self._left = start, restarts
        self._ended, self._starting = threading.Event(), threading.Lock()
        self._log = logging.getLogger(__name__)

    def terminate(self) -> None:
        with self._starting:  # what is being started now is ended too
            self._ended.set()
            super().terminate()

    def wait(self) -> None:
        self.adapter.wait()
        while not self._ended.is_set() and (code := self.adapter.poll()) in _KILLED:
            if not self._left:
                self._log.error("the job's process was killed (%s) once more; the job goes on without us", code)
                return
            self._left -= 1
            self._log.warning("the job's process was killed (%s) and is started again", code)
            self._ended.wait(_PAUSE)
            with self._starting:
                if self._ended.is_set():
                    return
                self.adapter = self._start()
            self.adapter.wait()


class SupervisedLauncher(ClientProcessJobLauncher):
    """FLARE's launcher of a hospital's job processes, with ``SupervisedHandle``."""

    def launch_job(self, job_meta: Json, fl_ctx: FLContext) -> SupervisedHandle:
        environment = os.environ.copy()
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        if custom := workspace.get_app_custom_dir(job_meta.get(JobConstants.JOB_ID)):
            add_custom_dir_to_path(custom, environment)
        environment.update(get_credential_env(fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS) or {}))
        command = shlex.split(self.get_command(job_meta, fl_ctx), True)
        return SupervisedHandle(lambda: spawn_process(command, environment))


class LostJobs(FLComponent):
    """At the start of the server: jobs that the store calls running are over, for no process runs them. FLARE would
    show them as RUNNING for ever, and refuse to abort or to delete them."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        engine = fl_ctx.get_engine()
        if event_type == EventType.SYSTEM_START and isinstance(engine, ServerEngine):
            engine.job_runner.update_abnormal_finished_jobs([], fl_ctx)


_FLARES = f"{ClientProcessJobLauncher.__module__}.{ClientProcessJobLauncher.__name__}"
_OURS = f"{SupervisedLauncher.__module__}.{SupervisedLauncher.__name__}"
_LOST = f"{LostJobs.__module__}.{LostJobs.__name__}"


def supervise(resources: Resources, hospital: bool) -> None:
    """Put the launcher into a hospital's ``resources.json``, or ``LostJobs`` into a server's; safe to repeat."""
    if hospital:
        for component in resources.components:
            if component.path == _FLARES:
                component.path = _OURS
    elif not any(component.path == _LOST for component in resources.components):
        resources.components = [*resources.components, Component(id="medpfl_lost_jobs", path=_LOST, args={})]


def unsupervised(resources: Resources, hospital: bool) -> Literal["before", "other", None]:
    """Why nobody looks after what dies here; None: somebody does.

    Returns:
        "before": ``supervise`` was not done to these ``resources.json``; "other": the hospital starts its job processes
        by a launcher that is not FLARE's default, say in containers, and what it does then is its own affair.
    """
    paths = {component.path for component in resources.components}
    if (_OURS if hospital else _LOST) in paths:
        return None
    return "other" if hospital and _FLARES not in paths else "before"
