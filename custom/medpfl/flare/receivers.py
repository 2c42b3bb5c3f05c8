# SPDX-License-Identifier: Apache-2.0
"""What FLARE's ``add_experiment_tracking`` adds to a recipe, as the tracker of ours that writes the same.

FLARE's receivers take what hospitals send while they run under FLARE, and have no place for what the server itself
measured (the mean). A tracker is told by the server, in ``simulate`` too.
"""

from nvflare.app_common.widgets.streaming import AnalyticsReceiver

from medpfl.core.errors import ConfigError
from medpfl.results.callbacks import Callback
from medpfl.results.trackers.mlflow import ADDRESS, MLflow
from medpfl.results.trackers.tensorboard import FOLDER, TensorBoard


def tracker_for(receiver: AnalyticsReceiver, job: str) -> Callback:
    """The tracker in place of a receiver of FLARE's.

    Args:
        job: the recipe's name, by which FLARE's helper names experiment and run where it is told none.

    Raises:
        ConfigError: there is none for this kind, or the receiver was given what a tracker does not do.
    """
    kind = type(receiver).__name__
    if kind == "TBAnalyticsReceiver":
        _only(kind, receiver, {"tb_folder": FOLDER})
        return TensorBoard()
    if kind == "MLflowReceiver":
        if receiver.tracking_uri is not None:
            raise ConfigError(
                f"MLflowReceiver: 'tracking_uri' is not a job's to say: set {ADDRESS} where the server runs"
            )
        said = {"run_name": f"{job}-Server", **receiver.kw_args}
        experiment = said.pop("experiment_name")
        _only(kind, receiver, {"artifact_location": "artifacts", "buff_flush_time": 1})
        if said != {"run_name": f"{job}-Server"}:
            raise ConfigError(f"MLflowReceiver: of 'kw_args' only 'experiment_name' is used here, got {sorted(said)}")
        return MLflow(None if experiment == f"{job}-experiment" else experiment)
    raise ConfigError(f"{kind}: MedPFL has trackers for TensorBoard and MLflow; write one (CONTRIBUTING.md) for others")


def _only(kind: str, receiver: AnalyticsReceiver, usual: dict[str, object]) -> None:
    for name, value in usual.items():
        if (got := getattr(receiver, name)) != value:
            raise ConfigError(f"{kind}: '{name}' cannot be changed here: expected {value!r}, got {got!r}")
