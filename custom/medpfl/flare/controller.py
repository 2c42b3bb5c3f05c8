# SPDX-License-Identifier: Apache-2.0
"""The server's FLARE controller of a training job: rounds, a quorum in each, probes of missing hospitals."""

import time
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.utils.memory_utils import cleanup_memory
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer
from medpfl.flare.exchange import ExchangeController
from medpfl.flare.executor import PROBE
from medpfl.rounds.coordinator import Coordinator
from medpfl.rounds.settings import Settings

_CLEANUP_ROUNDS = 10
_BIG_MODEL = 50_000_000  # bytes of one hospital's payload above which memory is cleaned up every round


class MixingController(ExchangeController):
    """Arguments: those of ``medpfl.rounds.settings.Settings``."""

    def __init__(self, **settings: Any):
        self.settings = Settings(**settings)
        super().__init__(self.settings.grace)
        self._stats: dict[str, Any] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._stats:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.set_info("medpfl", dict(self._stats))

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
            if messages := coordinator.statistics_messages(round_number, sites):
                replies = self._exchange(messages, settings.train_timeout, need, abort_signal, fl_ctx)
                coordinator.take_statistics(round_number, replies)
            messages = coordinator.train_messages(round_number, sites)
            replies = self._exchange(messages, settings.train_timeout, need, abort_signal, fl_ctx)
            mixed = coordinator.take_train(round_number, replies, started)
            while messages := coordinator.refine_messages():
                replies = self._exchange(messages, settings.train_timeout, need, abort_signal, fl_ctx)
                coordinator.take_refined(replies)
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
        self.log_info(fl_ctx, f"results are in {coordinator.results}")

    def _new_coordinator(self, fl_ctx: FLContext) -> Coordinator:
        engine, workspace = fl_ctx.get_engine(), fl_ctx.get_workspace()
        job, min_clients, roster = self._job_of(fl_ctx)
        mixers = {}
        for slot in self.settings.slots:
            mixer = engine.get_component(slot)
            if not isinstance(mixer, Mixer):
                raise ConfigError(f"slot '{slot}' needs a server component of that id, got {type(mixer).__name__}")
            mixers[slot] = mixer
        home = Path(workspace.get_root_dir()) / "medpfl" / job
        return Coordinator(self.settings, mixers, job, roster, min_clients, home, self._results_of(fl_ctx))

    def _tell(self, round_number: int, mixed: list[str], fl_ctx: FLContext) -> None:
        assert isinstance(self.coordinator, Coordinator)
        best = {model: round(found.score, 4) for model, found in self.coordinator.best.items()}
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
