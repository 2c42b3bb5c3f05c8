# SPDX-License-Identifier: Apache-2.0
"""The server's FLARE controller: carries the coordinator's messages, waits for a quorum, probes missing hospitals.

It is a plain ``Controller`` and not a ``ModelController``: the latter sends one model to everybody by a broadcast that
copies it, and fails the job on a hospital's error; here every hospital has its own payload and errors are counted.
"""

import threading
import time
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.utils.memory_utils import cleanup_memory
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from medpfl.core.errors import ConfigError, MedPFLError, Stopped
from medpfl.core.mixers import Mixer
from medpfl.flare.executor import PROBE
from medpfl.flare.wire import ERROR, from_shareable_, to_shareable
from medpfl.rounds.coordinator import Coordinator
from medpfl.rounds.messages import Message
from medpfl.rounds.settings import Settings

_CLEANUP_ROUNDS = 10
_BIG_MODEL = 50_000_000  # bytes of one hospital's payload above which memory is cleaned up every round


class MixingController(Controller):
    """Arguments: those of ``medpfl.rounds.settings.Settings``."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = Settings(**settings)
        self.coordinator: Coordinator | None = None
        self._stats: dict[str, Any] = {}
        self._missed: dict[str, int] = {}
        self._arrived = threading.Event()

    # -- FLARE's side -------------------------------------------------------------------------------------------------

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.log_info(fl_ctx, f"late result of task '{task_name}' from {client.name} is dropped")

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._stats:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.set_info("medpfl", dict(self._stats))

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            self._run(abort_signal, fl_ctx)
        except Stopped:
            self.log_info(fl_ctx, "the job was aborted")
        except MedPFLError as error:
            if self.coordinator:
                self.coordinator.record.fail(str(error))
            self.log_error(fl_ctx, str(error))
            self.system_panic(str(error), fl_ctx)

    # -- the job ------------------------------------------------------------------------------------------------------

    def _run(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        coordinator = self.coordinator = self._new_coordinator(fl_ctx)
        settings, need = self.settings, coordinator.min_sites
        roster = list(coordinator.roster)

        replies = self._exchange(coordinator.init_messages(), settings.init_timeout, len(roster), abort_signal, fl_ctx)
        coordinator.take_init(replies)
        self.log_info(fl_ctx, f"hospitals ready: {', '.join(coordinator.joined)}")
        for round_number in range(coordinator.done + 1, settings.rounds + 1):
            started = time.monotonic()
            sites = self._reachable(coordinator)
            probes = self._probe([site for site in coordinator.joined if site not in sites], fl_ctx)
            messages = coordinator.train_messages(round_number, sites)
            replies = self._exchange(messages, settings.train_timeout, need, abort_signal, fl_ctx)
            mixed = coordinator.take_train(round_number, replies, started)
            for task in probes:
                self.cancel_task(task)
            self._tell(round_number, mixed, fl_ctx)
            if round_number % _CLEANUP_ROUNDS == 0 or coordinator.payload_bytes() > _BIG_MODEL:
                cleanup_memory()
        sites = self._reachable(coordinator)
        messages = coordinator.validate_messages(sites)
        coordinator.take_validation(self._exchange(messages, settings.train_timeout, len(sites), abort_signal, fl_ctx))
        messages = coordinator.finish_messages(sites)
        coordinator.take_final(self._exchange(messages, settings.train_timeout, len(sites), abort_signal, fl_ctx))
        self.log_info(fl_ctx, f"results are in {coordinator.record.folder}")

    def _new_coordinator(self, fl_ctx: FLContext) -> Coordinator:
        engine, workspace = fl_ctx.get_engine(), fl_ctx.get_workspace()
        meta: dict[str, Any] = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
        if not isinstance(meta.get("min_clients"), int):
            raise ConfigError(f"the job's meta.json must give 'min_clients', got {meta.get('min_clients')!r}")
        mixers = {}
        for slot in self.settings.slots:
            mixer = engine.get_component(slot)
            if not isinstance(mixer, Mixer):
                raise ConfigError(f"slot '{slot}' needs a server component of that id, got {type(mixer).__name__}")
            mixers[slot] = mixer
        job = str(meta.get("name", "job"))
        run_folder = Path(workspace.get_run_dir(fl_ctx.get_job_id()))
        return Coordinator(
            self.settings,
            mixers,
            job,
            [client.name for client in engine.get_clients()],
            meta["min_clients"],
            Path(workspace.get_root_dir()) / "medpfl" / job,
            run_folder / "results",
        )

    def _tell(self, round_number: int, mixed: list[str], fl_ctx: FLContext) -> None:
        assert self.coordinator is not None
        best = {model: round(found["score"], 4) for model, found in self.coordinator.best.items()}
        self._stats = {
            "round": round_number,
            "rounds": self.settings.rounds,
            "hospitals": len(mixed),
            **{f"best_{self.coordinator.score}_{model}": value for model, value in best.items()},
        }
        self.log_info(fl_ctx, f"round {round_number}/{self.settings.rounds}: mixed {', '.join(mixed)}; best {best}")

    # -- exchange -----------------------------------------------------------------------------------------------------

    def _reachable(self, coordinator: Coordinator) -> list[str]:
        """Hospitals to wait for; those that keep missing are left out as long as enough others are there."""
        sites = [site for site in coordinator.joined if self._missed.get(site, 0) < self.settings.patience]
        return sites if len(sites) >= coordinator.min_sites else coordinator.joined

    def _probe(self, sites: list[str], fl_ctx: FLContext) -> list[Task]:
        """Ask hospitals that kept missing for a sign of life; one that gives it is addressed again next round."""

        def alive(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._missed[client_task.client.name] = 0

        tasks = []
        for site in sites:
            task = Task(PROBE, data=Shareable(), result_received_cb=alive)
            self.send(task=task, targets=[site], fl_ctx=fl_ctx)
            tasks.append(task)
        return tasks

    def _exchange(
        self, messages: dict[str, Message], timeout: float, quorum: int, abort_signal: Signal, fl_ctx: FLContext
    ) -> dict[str, Message]:
        """Send every hospital its own message in parallel and gather the replies.

        Ends when all have answered, ``grace`` seconds after ``quorum`` of them have, or after ``timeout`` seconds.

        Raises:
            Stopped: the job was aborted.
        """
        assert self.coordinator is not None
        results: dict[str, Shareable] = {}

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            # Runs under FLARE's locks, which every heartbeat waits for: keep the result, think later.
            results[client_task.client.name] = client_task.result
            client_task.result = None
            self._arrived.set()

        tasks = {}
        for site, message in messages.items():
            # The task's own timeout is only a safety net: this loop decides.
            task = Task(
                message.header["task"],
                data=to_shareable(message),
                timeout=int(timeout) + 60,
                result_received_cb=received,
            )
            self.send(task=task, targets=[site], fl_ctx=fl_ctx)
            tasks[site] = task
        started, quorum_at = time.monotonic(), None
        replies: dict[str, Message] = {}
        while len(results) < len(tasks):
            self._arrived.wait(0.2)
            self._arrived.clear()
            if abort_signal.triggered:
                raise Stopped("aborted")
            now = time.monotonic()
            good = sum(result.get_return_code() == ReturnCode.OK for result in list(results.values()))
            if quorum_at is None and good >= quorum:
                quorum_at = now
            if now - started > timeout or (quorum_at is not None and now - quorum_at > self.settings.grace):
                break
        for site, task in tasks.items():
            done = site in results
            self.cancel_task(task, TaskCompletionStatus.OK if done else TaskCompletionStatus.TIMEOUT)
            # FLARE 2.9's task monitor dies of a KeyError when a hospital was sent a task twice while others were
            # waiting; finished tasks then stay in its list for ever, so they must not hold the payload.
            task.data = Shareable()
        for site, message in messages.items():
            round_number = message.header.get("round", 0)
            result = results.get(site)
            if result is None:
                self._missed[site] = self._missed.get(site, 0) + 1
                self.coordinator.refuse(site, round_number, "did not answer in time")
                continue
            self._missed[site] = 0
            if result.get_return_code() != ReturnCode.OK:
                reason = result.get_header(ERROR, result.get_return_code())
                self.coordinator.refuse(site, round_number, f"failed: {reason}")
                continue
            replies[site] = from_shareable_(result)
        return replies
