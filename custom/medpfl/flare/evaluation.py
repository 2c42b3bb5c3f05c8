# SPDX-License-Identifier: Apache-2.0
"""The server's FLARE controller of a job that only evaluates a given model."""

from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from medpfl.flare.authorize import check_allowed
from medpfl.flare.exchange import ExchangeController
from medpfl.job import load_trackers
from medpfl.job.names import MODEL_FILE
from medpfl.job.settings import EvaluationSettings
from medpfl.rounds.evaluation import EvaluationCoordinator
from medpfl.rounds.loop import carry, evaluating


class EvaluationController(ExchangeController):
    """Arguments: those of ``medpfl.job.settings.EvaluationSettings``. The model lies beside the job's JSON."""

    def __init__(self, **settings: Any):
        self.settings = EvaluationSettings(**settings)
        super().__init__(grace=self.settings.timeout)  # all hospitals are waited for

    def _run(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        job, min_clients, roster = self._job_of(fl_ctx)
        config = Path(fl_ctx.get_workspace().get_app_config_dir(fl_ctx.get_job_id()))
        trackers = load_trackers(config, lambda path: check_allowed(path, fl_ctx))
        self.coordinator = coordinator = EvaluationCoordinator(
            self.settings, job, roster, min_clients, config / MODEL_FILE, self._results_of(fl_ctx), trackers
        )
        carry(evaluating(coordinator), lambda exchange: self._exchange(exchange, abort_signal, fl_ctx))
        self.log_info(fl_ctx, f"results are in {coordinator.results}")
