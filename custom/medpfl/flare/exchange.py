# SPDX-License-Identifier: Apache-2.0
"""What the server's controllers share: how messages are carried to the hospitals and their replies gathered.

It is a plain ``Controller`` and not a ``ModelController``: the latter sends one model to everybody by a broadcast that
copies it, and fails the job on a hospital's error; here every hospital has its own payload and errors are counted.
"""

import dataclasses
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from medpfl.core.errors import CodecError, ConfigError, MedPFLError, Stopped
from medpfl.core.mapped import release
from medpfl.flare.asking import Asking
from medpfl.flare.commands import refuse_commands_to_job
from medpfl.flare.failures import GONE, Gone
from medpfl.flare.fetching import Answers, Fetcher, LostAnswer
from medpfl.flare.filters import decoded, take_decoding, traffic_of
from medpfl.flare.leaving import check_filters
from medpfl.flare.memory import CLEANER
from medpfl.flare.outliving import outlive_answers
from medpfl.flare.wire import read_reply, to_shareable
from medpfl.job.declared import name_of
from medpfl.rounds.evaluation import EvaluationCoordinator
from medpfl.rounds.loop import Exchange
from medpfl.rounds.messages import Message, byte_count, flatten
from medpfl.rounds.protocol.replies import Reply
from medpfl.rounds.protocol.requests import RefineRequest, Request
from medpfl.rounds.server.coordinator import Coordinator


class ExchangeController(Controller):
    """A controller that runs a coordinator; ``grace``: see ``_exchange``."""

    def __init__(self, grace: float):
        super().__init__()
        self.coordinator: Coordinator | EvaluationCoordinator | None = None
        self._grace = grace
        self._fetcher: Fetcher | None = None
        self._asking: Asking | None = None
        self._coded: frozenset[str] = frozenset()
        self._missed: dict[str, int] = {}
        self._gone: Gone | None = None
        self._arrived = threading.Event()

    @abstractmethod
    def _run(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole job."""

    def start_controller(self, fl_ctx: FLContext) -> None:
        refuse_commands_to_job(fl_ctx)
        outlive_answers()  # FLARE takes none before it has called this
        self._gone = Gone(fl_ctx, self._arrived.set)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"late result of task '{task_name}' from {client.name} is dropped")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            check_filters(fl_ctx)
            self._coded = take_decoding(fl_ctx)
            self._fetcher, self._asking = Fetcher(fl_ctx), Asking(fl_ctx)
            self._run(abort_signal, fl_ctx)
        except Stopped:
            self.log_info(fl_ctx, "the job was aborted")
        except MedPFLError as error:
            if self.coordinator:
                try:
                    self.coordinator.record.fail(str(error))
                except MedPFLError as unwritten:  # a full disk may be why the job ends, and must not hide it
                    self.log_error(fl_ctx, str(unwritten))
            self.log_error(fl_ctx, str(error))
            self.system_panic(str(error), fl_ctx)
        finally:
            if self._asking:
                self._asking.close()

    def _are_gone(self) -> frozenset[str]:
        """Hospitals whose process of this job has ended: FLARE lets none of them into it again."""
        return frozenset(self._gone.sites) if self._gone else frozenset()

    # -- what a coordinator is made of --------------------------------------------------------------------------------

    def _job_of(self, fl_ctx: FLContext) -> tuple[str, int, list[str]]:
        """The job's name, how many hospitals it needs, and which are there.

        Raises:
            ConfigError: its meta.json does not say how many, or its name cannot be a folder's: FLARE looks at neither.
        """
        meta: Mapping[str, object] = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
        min_clients = meta.get("min_clients")
        if not isinstance(min_clients, int):
            raise ConfigError(f"the job's meta.json must give 'min_clients', got {min_clients!r}")
        roster = [client.name for client in fl_ctx.get_engine().get_clients()]
        return name_of(meta.get("name")), min_clients, roster

    def _results_of(self, fl_ctx: FLContext) -> Path:
        """Where the job's results are written, to be downloaded with it."""
        return Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())) / "results"

    def _gradients(self) -> list[str]:
        """Slots of which hospitals send gradients."""
        mixers = self.coordinator.copies.mixers if isinstance(self.coordinator, Coordinator) else {}
        return [slot for slot, mixer in mixers.items() if mixer.takes == "gradients"]

    # -- exchange -----------------------------------------------------------------------------------------------------

    def _exchange(self, exchange: Exchange, abort_signal: Signal, fl_ctx: FLContext) -> dict[str, Message[Reply]]:
        """Send every hospital its own message in parallel and gather the replies; a hospital whose answer is lost on
        its way is asked once more.

        Ends when all have answered, ``grace`` seconds after the quorum or all that are awaited have, or after the
        exchange's timeout.

        Raises:
            Stopped: the job was aborted.
        """
        assert self.coordinator is not None and self._fetcher is not None and self._asking is not None
        asking = self._asking
        answers = Answers(self._fetcher, self._arrived.set, exchange.timeout / max(1, len(exchange.messages)))

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            asking.no_task_for(client_task.client.name)
            answers.came(client_task.client, client_task.result)
            client_task.result = None

        tasks: list[tuple[str, Task]] = []

        def ask(site: str) -> None:
            message = exchange.messages[site]
            # The task's own timeout is only a safety net: this loop decides.
            task = Task(
                message.header.task,
                data=to_shareable(message),
                timeout=int(exchange.timeout) + 60,
                result_received_cb=received,
            )
            self.send(task=task, targets=[site], fl_ctx=fl_ctx)
            asking.task_for(site)
            tasks.append((site, task))

        for site in exchange.messages:
            ask(site)
        started, quorum_at = time.monotonic(), None
        awaited = set(exchange.messages if exchange.awaited is None else exchange.awaited)
        replies: dict[str, Message[Reply]] = {}
        failed: dict[str, str] = {}
        lost: set[str] = set()
        sent = [flatten(message.slots).values() for message in exchange.messages.values()]
        size = max((byte_count(message.slots) for message in exchange.messages.values()), default=0)
        cleaned = started
        try:
            while len(replies) + len(failed) < len(exchange.messages):
                self._arrived.wait(0.2)
                self._arrived.clear()
                if abort_signal.triggered:
                    raise Stopped("aborted")
                for site, answer in answers.take():  # outside FLARE's locks, and while others still compute or send
                    try:
                        replies[site] = self._read(site, answer, exchange.messages[site], fl_ctx)
                    except LostAnswer as error:
                        # Of a further exchange in a round it may have made half; else it goes back and begins anew.
                        header = exchange.messages[site].header
                        if site in lost or isinstance(header, RefineRequest):
                            failed[site] = str(error)
                        else:
                            lost.add(site)
                            self.coordinator.record.event(header.round, site, f"{error}; it is asked once more")
                            answers.again(site)
                            ask(site)
                    except MedPFLError as error:
                        failed[site] = str(error)
                    del answer  # its arrays are in the reply now, or in a file
                for site in sorted(self._are_gone() & exchange.messages.keys() - replies.keys() - failed.keys()):
                    failed[site] = GONE
                release(tensor for tensors in sent for tensor in tensors)  # what hospitals have fetched of files
                now = time.monotonic()
                if now - cleaned > 1:  # pieces that hospitals have fetched
                    self._fetcher.tidy()
                    cleaned = time.monotonic()
                if quorum_at is None and (len(replies) >= exchange.quorum or awaited <= {*replies, *failed}):
                    quorum_at = now
                if now - started > exchange.timeout or (quorum_at is not None and now - quorum_at > self._grace):
                    break
        finally:
            answers.stop()
            CLEANER.clean(size)
        for site, task in tasks:
            asking.no_task_for(site)
            done = site in replies or site in failed
            self.cancel_task(task, TaskCompletionStatus.OK if done else TaskCompletionStatus.TIMEOUT)
            # FLARE 2.9's task monitor dies of a KeyError when a hospital was sent a task twice while others were
            # waiting; finished tasks then stay in its list for ever, so they must not hold the payload.
            task.data = Shareable()
        self._tell_missing(exchange, replies, failed)
        return {site: replies[site] for site in exchange.messages if site in replies}

    def _tell_missing(self, exchange: Exchange, replies: Collection[str], failed: Mapping[str, str]) -> None:
        """Who has not answered, and why."""
        assert self.coordinator is not None
        for site, message in exchange.messages.items():
            round_number = message.header.round
            if site not in replies and site not in failed:
                self._missed[site] = self._missed.get(site, 0) + 1
                self.coordinator.refuse(site, round_number, "did not answer in time")
                continue
            self._missed[site] = 0
            if site in failed:
                self.coordinator.refuse(site, round_number, f"failed: {failed[site]}")

    def _read(
        self, site: str, answer: Shareable | MedPFLError, asked: Message[Request], fl_ctx: FLContext
    ) -> Message[Reply]:
        """A hospital's answer.

        Raises:
            MedPFLError: it says that it failed, did not come whole, or cannot be read.
        """
        if isinstance(answer, MedPFLError):
            raise answer
        if asked.header.task in self._coded:
            try:
                answer = decoded(answer, fl_ctx, site)
            except MedPFLError as error:
                self.log_error(fl_ctx, str(error))
                raise CodecError(error.public) from error
        reply = read_reply(answer, asked.slots, self._gradients())
        assert self._fetcher is not None
        self._fetcher.size_is(byte_count(reply.slots))
        if isinstance(self.coordinator, Coordinator):
            reply = self.coordinator.arrived(site, reply)
        return dataclasses.replace(reply, encoded=traffic_of(fl_ctx, site))
