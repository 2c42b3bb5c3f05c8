# SPDX-License-Identifier: Apache-2.0
"""What MLflow's store holds after a job equals its metrics.jsonl: an experiment a job, in it a run a hospital.

mlflow is no part of the extra "test": it is heavy. ``pip install mlflow`` runs these.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from medpfl import FedSMRecipe, Segmentation, Settings
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.job import Job
from medpfl.methods.fedsm import FedSM
from medpfl.models.unet import UNet
from medpfl.results.files import read_lines, read_summary
from medpfl.results.trackers.mlflow import ADDRESS, MLflow, write_mlflow
from medpfl.results.trackers.scalars import Scalar, scalars
from medpfl.rounds.simulate import simulate

if TYPE_CHECKING:
    from mlflow.tracking.client import MlflowClient

pytestmark = pytest.mark.slow
mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'medpfl[mlflow]'")


def stored(client: "MlflowClient", experiment: str) -> dict[str, list[Scalar]]:
    """Run's name to its numbers, sorted; every run ended well."""
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    runs = {}
    for run in client.search_runs([found.experiment_id]):
        assert run.info.status == "FINISHED"
        site = run.data.tags["site"]
        runs[str(run.info.run_name)] = sorted(
            Scalar(site, name, metric.value, metric.step)
            for name in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, name)
        )
    return runs


def test_mlflow_holds_the_lines(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking.client import MlflowClient

    monkeypatch.delenv(ADDRESS, raising=False)
    folder = tmp_path / "results"
    simulate(make_job(rounds=2), table_sites, folder, tmp_path / "home", trackers=[MLflow()])
    assert not [one for one in read_summary(folder).events if "tracker" in one.event]
    wanted = {
        f"small {site}": sorted(one for one in scalars(read_lines(folder)) if one.site == site)
        for site in (*table_sites, "mean", "server")
    }
    assert stored(MlflowClient(f"sqlite:///{folder / 'mlflow.db'}"), "small") == wanted

    afterwards = f"sqlite:///{tmp_path / 'afterwards.db'}"
    write_mlflow(folder, afterwards)
    assert stored(MlflowClient(afterwards), "small") == wanted


def test_an_address_that_cannot_be_used_is_one_sentence(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS, f"sqlite:///{tmp_path / 'no' / 'such' / 'folder.db'}")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # MLflow tries a database again and again
    (tmp_path / "no").write_text("a file")
    folder = tmp_path / "results"
    simulate(make_job(rounds=1), table_sites, folder, tmp_path / "home", trackers=[MLflow("mine")])
    (event,) = read_summary(folder).events
    assert "the tracker MLflow failed and is told no more" in event.event
    with pytest.raises(MedPFLError, match="cannot be used"):
        write_mlflow(folder, "nonsense://host")


def test_flares_experiment_tracking_names_the_experiment() -> None:
    from nvflare.recipe.utils import add_experiment_tracking

    task = Segmentation(dataset="organ", size=(48, 48), spacing=(4.0, 4.0, 8.0), architecture=UNet(channels=(8, 16)))
    recipe = FedSMRecipe(name="organ", method=FedSM(steps=1, lr=0.1), task=task, settings=Settings(rounds=1))
    add_experiment_tracking(recipe, "mlflow")
    add_experiment_tracking(recipe, "mlflow", {"kw_args": {"experiment_name": "thesis"}})
    assert recipe.job.trackers == (MLflow(), MLflow("thesis"))
    with pytest.raises(ConfigError, match="'tracking_uri' is not a job's to say: set MLFLOW_TRACKING_URI"):
        add_experiment_tracking(recipe, "mlflow", {"tracking_uri": "http://elsewhere:5000"})
