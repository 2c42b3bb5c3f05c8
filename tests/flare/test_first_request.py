# SPDX-License-Identifier: Apache-2.0
"""A hospital keeps a job's first request, for a process of it that is started again."""

from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal

from in_process import Engine, new_workspace
from medpfl.flare.executor import SiteExecutor
from medpfl.flare.wire import ERROR, failure_of, to_shareable
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.requests import InitRequest
from small_jobs import small_job


class Ready:
    """A hospital that is ready at once."""

    def handle(self, message: Message[Any]) -> None:
        """Of the answer nothing is looked at before the request is kept."""

    def recover(self) -> None:
        """It holds nothing."""


def test_where_it_cannot_be_kept_the_server_hears_why(tmp_path: Path) -> None:
    """A file where FLARE's folder of the job should be stands for a full disk."""
    job = small_job()
    executor = SiteExecutor(job.method, job.task)
    fl_ctx = Engine("anna", new_workspace(tmp_path, "anna"), {}, []).new_context()
    folder = Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id()))
    if folder.is_dir():
        folder.rmdir()
    folder.write_text("")
    executor._runner = Ready()  # type: ignore[assignment]
    first = InitRequest(
        job="small", rounds=2, roster=("anna", "berta"), seed=0, threads=1, slots={"model": True}, gradients=()
    )
    reply = executor.execute("init", to_shareable(Message(first)), fl_ctx, Signal())
    assert reply.get_header(ERROR) == "a file could not be written: File exists"


def test_where_flare_fails_before_us_the_server_hears_where_to_look() -> None:
    """On a full disk FLARE cannot write its audit.log, and asks no executor; it answers by a code alone."""
    told = failure_of(make_reply(ReturnCode.EXECUTION_EXCEPTION))
    assert told == "FLARE itself failed there (EXECUTION_EXCEPTION), as it does where the disk of the kit is full"
    assert failure_of(make_reply(ReturnCode.TASK_ABORTED)) == "TASK_ABORTED"
