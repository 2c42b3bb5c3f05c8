# SPDX-License-Identifier: Apache-2.0
"""An MLflow that was reached and does not answer any more, or lets an account write and not look: a sentence."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from medpfl.core.errors import MedPFLError
from medpfl.results.trackers import mlflow


class MlflowError(Exception):
    """In the place of MLflow's own, which need not be installed here."""


class Client:
    """Knows the experiment, and refuses all else."""

    def __init__(self, address: str):
        self.address = address

    def get_experiment_by_name(self, name: str) -> Any:
        return type("Experiment", (), {"experiment_id": "1"})()

    def search_runs(self, *args: Any, **more: Any) -> list[Any]:
        raise MlflowError("PERMISSION_DENIED: no")

    def set_terminated(self, *args: Any) -> None:
        raise MlflowError("PERMISSION_DENIED: no")


@pytest.mark.parametrize(
    "ask", [lambda store: store.has("run", "0123"), lambda store: store.end("r1")], ids=["which are there", "to end"]
)
def test_a_server_that_refuses_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[mlflow.Store], object]
) -> None:
    """A comparison that had trained everything ended with MLflow's traceback."""
    names = ("mlflow", "mlflow.exceptions", "mlflow.tracking", "mlflow.tracking.client")
    modules = {name: ModuleType(name) for name in names}
    modules["mlflow.exceptions"].MlflowException = MlflowError  # type: ignore[attr-defined]
    modules["mlflow.tracking.client"].MlflowClient = Client  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(mlflow, "require", lambda *said: None)
    store = mlflow.Store("http://tracking", "heart")
    with pytest.raises(MedPFLError, match=r"MLflow .*: PERMISSION_DENIED: no$"):
        ask(store)
