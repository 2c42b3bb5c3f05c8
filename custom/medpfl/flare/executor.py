# SPDX-License-Identifier: Apache-2.0
"""The hospital's FLARE executor: hands tasks to ``SiteRunner`` and its failures to the server without their details."""

import dataclasses
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from medpfl.core.errors import MedPFLError, ProtocolError, Stopped
from medpfl.data.site_file import find_site_file
from medpfl.deployed.evaluate import write_text
from medpfl.flare.asking import ask_again
from medpfl.flare.commands import refuse_others
from medpfl.flare.differences import answer
from medpfl.flare.flooding import refuse_arrays
from medpfl.flare.home import home_of
from medpfl.flare.leaving import check_filters, filters_out, untouched
from medpfl.flare.memory import CLEANER
from medpfl.flare.wire import ERROR, read_request
from medpfl.methods.contract import Method
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message, byte_count
from medpfl.rounds.protocol.requests import InitRequest, Request
from medpfl.rounds.protocol.text import Asked, parse
from medpfl.tasks.contract import Task

PROBE = "probe"


class SiteExecutor(Executor):
    """Args: ``method`` and ``task``, components of the job's ``config_fed_client.json``."""

    def __init__(self, method: Method, task: Task):
        super().__init__()
        for name, value, kind in (("method", method, Method), ("task", task, Task)):
            if not isinstance(value, kind):
                raise TypeError(
                    f"the executor's argument '{name}' must be a {kind.__name__}, got {type(value).__name__}"
                )
        self.method, self.task = method, task
        self._runner: SiteRunner | None = None
        self._abort: Signal | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.ABOUT_TO_START_RUN:
            refuse_others(getattr(fl_ctx.get_engine(), "get_cell", lambda: None)())
            refuse_arrays()
        elif event_type == EventType.START_RUN:
            ask_again(fl_ctx)
        elif event_type == EventType.END_RUN and self._runner is not None:
            self._runner.close()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        self._abort = abort_signal
        if task_name == PROBE:
            return make_reply(ReturnCode.OK)
        try:
            if self._runner is None:
                check_filters(fl_ctx, hospital=True)
            request = dataclasses.replace(read_request(shareable), own=untouched(fl_ctx))
            if request.header.task != task_name:
                raise ProtocolError(f"task '{task_name}' came with a request to '{request.header.task}'")
            CLEANER.clean(byte_count(request.slots))
            if self._runner is None:
                self._runner = self._started(request.header, fl_ctx)
            reply = self._runner.handle(request)
            if isinstance(request.header, InitRequest):
                write_text(_asked_of(fl_ctx), Asked(content=request.header).model_dump_json())
            return answer(reply, request, self._runner, fl_ctx)
        except Stopped:
            return make_reply(ReturnCode.TASK_ABORTED)
        except MedPFLError as error:
            # In the log alone: of what FLARE's event tells, its console's show_errors shows the lead every word.
            self.log_error(fl_ctx, f"{task_name}: {error}", fire_event=False)
            public = error.public
        except Exception as error:  # whatever fails in training is this hospital's failed round; the job goes on
            self.log_exception(fl_ctx, f"{task_name} failed")
            public = f"{type(error).__name__} (see this hospital's log)"
        if self._runner is not None:
            self._runner.recover()
        reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
        reply.set_header(ERROR, public)
        return reply

    def _started(self, request: Request, fl_ctx: FLContext) -> SiteRunner:
        """A new runner; ready, if this process was started after another one of this job was killed."""
        runner, file = self._new_runner(fl_ctx), _asked_of(fl_ctx)
        if not isinstance(request, InitRequest) and file.is_file():
            runner.handle(Message(parse(Asked, file.read_text(encoding="utf-8")).content))
        return runner

    def _new_runner(self, fl_ctx: FLContext) -> SiteRunner:
        name: str = fl_ctx.get_identity_name()
        workspace = fl_ctx.get_workspace()
        scope: dict[str, object] | None = fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES)
        return SiteRunner(
            name,
            self.method,
            self.task,
            lambda: find_site_file(name, scope, Path(workspace.get_site_config_dir())),
            home_of(fl_ctx),
            lambda: bool(self._abort and self._abort.triggered),
            filters_out(fl_ctx),
        )


def _asked_of(fl_ctx: FLContext) -> Path:
    """Where a job's first request is kept, in FLARE's folder of the job."""
    return Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())) / "medpfl_asked.json"
