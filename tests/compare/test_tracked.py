# SPDX-License-Identifier: Apache-2.0
"""What MLflow's store holds of a comparison equals its results.json: a run for each of its runs.

mlflow is no part of the extra "test": it is heavy. ``pip install mlflow`` runs what needs it.
"""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from comparing import SOFT, compared
from medpfl.compare.counted import Counted, counted_in
from medpfl.compare.orders import Order
from medpfl.compare.results import Results
from medpfl.compare.run_results import TrainedRun
from medpfl.compare.tracked import numbers, parameters, write_comparison
from medpfl.core.errors import MedPFLError
from medpfl.results.files import parse
from small_jobs import write_table_sites

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("comparison")
    sites = write_table_sites(folder / "sites", ["anna", "berta", "clara"])
    _, content = compared(folder, sites, methods={"Soft": SOFT})
    return folder / "results", content


def test_every_run_says_its_parameters_and_the_tables_numbers(finished: tuple[Path, Results]) -> None:
    folder, content = finished
    assert {row.method for row in content.runs} == {"Local", "FedAvg", "Soft"}
    for row in content.runs:
        inside = folder / "runs" / row.digest
        order = parse(TypeAdapter(Order), (inside / "order.json").read_text(), inside)
        done = parse(TypeAdapter(TrainedRun), (inside / "run.json").read_text(), inside)
        told = dict(parameters(order, row))
        assert told["method"] == row.method and told["rounds"] == "2" and told["task.dataset"] == "blood"
        assert told["method.steps"] == "5" and told["method.lr"] == "0.05"
        found = {(name, at): value for name, value, at in numbers(done, row, content.score, counted_in(content))}
        for shown in content.rows:
            if shown.name in done.rows:
                (value,) = (value for (name, _), value in found.items() if name == f"test/best/{shown.name}/accuracy")
                assert value == pytest.approx(shown.best.mean, abs=1e-6)  # results.json is rounded
                curve = [found[f"validation/{shown.name}/accuracy", at] for at in range(1, len(shown.curve) + 1)]
                assert curve == pytest.approx(shown.curve, abs=1e-6)
                one = next(value for (name, _), value in found.items() if name.endswith(f"{shown.name}/accuracy/berta"))
                assert one == pytest.approx(shown.hospitals["berta"].best.mean, abs=1e-6)


def test_a_hospital_without_a_score_does_not_count(finished: tuple[Path, Results]) -> None:
    """As in the tables: there was no mean at all."""
    folder, content = finished
    row = next(row for row in content.runs if row.method == "Local")
    inside = folder / "runs" / row.digest
    done = parse(TypeAdapter(TrainedRun), (inside / "run.json").read_text(), inside)
    local = done.rows["Local"]
    tested = {site: {"accuracy": None if site == "berta" else 0.5 + 0.1 * (site == "anna")} for site in local.best}
    broke = done.model_copy(update={"rows": {"Local": local.model_copy(update={"best": tested})}})
    for split, mean in ((None, [0.55]), (7, [])):  # of split 7 berta has a score of another model: Local's broke
        others = [(None, tested), (7, tested), (7, {"berta": {"accuracy": 0.9}})]
        told = numbers(broke, row.model_copy(update={"split": split}), "accuracy", Counted(others, content.hospitals))
        assert [value for name, value, _ in told if name == "test/best/Local/accuracy"] == pytest.approx(mean)


def test_mlflow_holds_them_once(finished: tuple[Path, Results], tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'medpfl[mlflow]'")
    from mlflow.tracking.client import MlflowClient

    folder, content = finished
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert [write_comparison(content, folder, address) for _ in range(2)] == [len(content.runs), 0]
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(content.comparison)
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {f"{row.method} seed {row.seed}" for row in content.runs}
    (soft,) = (run for run in runs if run.data.params["method"] == "Soft")
    assert soft.data.params["slot.model"] == "medpfl.core.mixers.soft_pull.SoftPull" and soft.info.status == "FINISHED"
    wanted = next(row for row in content.rows if row.name == "Soft").best.mean
    assert soft.data.metrics["test/best/Soft/accuracy"] == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(MedPFLError, match=r"cannot be read.*what a run's own folder holds"):
        write_comparison(content, tmp_path / "elsewhere", f"sqlite:///{tmp_path / 'other.db'}")
