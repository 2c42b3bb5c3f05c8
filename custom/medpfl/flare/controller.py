# SPDX-License-Identifier: Apache-2.0
"""The server's FLARE controller of a training job: rounds, a quorum in each, probes of missing hospitals."""

from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from medpfl.flare.authorize import check_allowed
from medpfl.flare.exchange import ExchangeController
from medpfl.flare.executor import PROBE
from medpfl.flare.home import home_of
from medpfl.flare.kits import hospitals_of
from medpfl.job import Job, load_config
from medpfl.job.settings import Settings
from medpfl.rounds.loop import Watch, carry, training
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.tasks.metrics.digits import digits


class MixingController(ExchangeController):
    """Arguments: those of ``medpfl.job.settings.Settings``."""

    def __init__(self, **settings: Any):
        self.settings = Settings(**settings)
        super().__init__(self.settings.grace)
        self._stats: dict[str, int | float] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._stats:
            collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
            if isinstance(collector, GroupInfoCollector):
                collector.set_info("medpfl", dict(self._stats))

    # -- the job ------------------------------------------------------------------------------------------------------

    def _run(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        coordinator = self.coordinator = self._new_coordinator(fl_ctx)
        probes: list[Task] = []

        def asked(round_number: int | None, joined: list[str]) -> list[str]:
            sites = self._reachable(coordinator)
            if round_number is not None:
                probes.extend(self._probe([site for site in joined if site not in sites], fl_ctx))
            return sites

        def ended(round_number: int, mixed: list[str]) -> None:
            while probes:
                self.cancel_task(probes.pop())
            self._tell(round_number, mixed, fl_ctx)

        watch = Watch(lambda joined: self.log_info(fl_ctx, f"hospitals ready: {', '.join(joined)}"), asked, ended)
        carry(training(coordinator, watch), lambda exchange: self._exchange(exchange, abort_signal, fl_ctx))
        self.log_info(fl_ctx, f"results are in {coordinator.results}")

    def _new_coordinator(self, fl_ctx: FLContext) -> Coordinator:
        workspace = fl_ctx.get_workspace()
        name, min_clients, roster = self._job_of(fl_ctx)
        # How slots are mixed follows from the method, which the hospitals' configuration names: FLARE brings it too.
        config = Path(workspace.get_app_config_dir(fl_ctx.get_job_id()))
        job = load_config(config, name, min_clients, lambda path: check_allowed(path, fl_ctx))
        assert isinstance(job, Job)
        home = home_of(fl_ctx) / name
        results = self._results_of(fl_ctx)
        coordinator = Coordinator(job, roster, home, results)
        for site in hospitals_of(Path(workspace.get_site_config_dir())):
            if site not in roster:
                coordinator.refuse(site, 0, "takes no part: it is not connected, or it refused the job")
        return coordinator

    def _tell(self, round_number: int, mixed: list[str], fl_ctx: FLContext) -> None:
        assert isinstance(self.coordinator, Coordinator)
        best = {model: round(found.score, 1 + digits([found.score])) for model, found in self.coordinator.best.items()}
        self._stats = {
            "round": round_number,
            "rounds": self.settings.rounds,
            "hospitals": len(mixed),
            **{f"best_{self.coordinator.terms.score}_{model}": value for model, value in best.items()},
        }
        self.log_info(fl_ctx, f"round {round_number}/{self.settings.rounds}: mixed {', '.join(mixed)}; best {best}")

    # -- exchange -----------------------------------------------------------------------------------------------------

    def _reachable(self, coordinator: Coordinator) -> list[str]:
        """Hospitals to wait for; those that keep missing are left out as long as enough others are there."""
        gone = self._are_gone()
        sites = [
            site
            for site in coordinator.joined
            if site not in gone and self._missed.get(site, 0) < self.settings.patience
        ]
        return sites if len(sites) >= coordinator.min_sites else coordinator.joined

    def _probe(self, sites: list[str], fl_ctx: FLContext) -> list[Task]:
        """Ask hospitals that kept missing for a sign of life; one that gives it is addressed again next round."""

        def alive(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._missed[client_task.client.name] = 0

        tasks = []
        for site in sorted(set(sites) - self._are_gone()):
            task = Task(PROBE, data=Shareable(), result_received_cb=alive)
            self.send(task=task, targets=[site], fl_ctx=fl_ctx)
            tasks.append(task)
        return tasks
