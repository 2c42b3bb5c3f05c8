# SPDX-License-Identifier: Apache-2.0
"""A kind of dataset from another package, which a site file names by its full class name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from medpfl.check.check import check_data
from medpfl.core.errors import SiteFileError
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Segmentation, Tabular
from spectra import KIND


def declare(folder: Path, site: str, kind: str = KIND) -> Path:
    """40 spectra of 5 values, whose class is told by the first."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(len(site))
    values = rng.random((40, 5))
    lines = np.column_stack([values[:, 0] > 0.5, values])
    np.savetxt(folder / f"{site}.txt", lines)
    dataset = {"kind": kind, "file": f"{site}.txt", "names": ["low", "high"], "split": {"seed": 1}}
    (folder / f"{site}.yaml").write_text(yaml.safe_dump({"site": site, "datasets": {"blood": dataset}}))
    return folder / f"{site}.yaml"


@pytest.mark.slow
def test_hospitals_train_on_it_and_predict_with_the_model(tmp_path: Path, make_job: Callable[..., Job]) -> None:
    files = {site: declare(tmp_path / "sites", site) for site in ("anna", "berta", "clarissa")}
    job = replace(make_job(rounds=3), task=Tabular("blood"))
    done = simulate(job, files, tmp_path / "results", tmp_path / "home")
    assert set(done.best) == {"personal", "personal_before_pull", "local", "fedavg", "fedavg_before_mean"}
    model = load_deployed(tmp_path / "home" / "anna" / "small" / "models" / "personal-best.safetensors")
    assert model.preparation["kind"] == KIND
    np.savetxt(tmp_path / "new.txt", np.random.default_rng(0).random((3, 5)))
    rows = predict(model, tmp_path / "new.txt", tmp_path / "predictions").rows
    assert [row["case"] for row in rows] == ["new.txt:1", "new.txt:2", "new.txt:3"]
    assert {"predicted", "p_low", "p_high"} <= set(rows[0])


def test_the_data_check_reads_it(tmp_path: Path) -> None:
    report = check_data(declare(tmp_path, "anna"), None, ("job", Tabular("blood")), lambda what, done, count: None)
    assert report.passed and report.inspections[0].kind == KIND and report.inspections[0].splits["train"].cases == 24


def test_what_it_does_not_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SiteFileError, match=r"of kind 'spectra\.Spectra', the job's task needs 'volumes' or 'images'"):
        Segmentation("blood").load(load_site_file(declare(tmp_path, "anna")))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("spectra.Missing", "there is no class 'spectra.Missing'"),
        ("collections.Counter", "'collections.Counter' is no kind of dataset"),
        ("spectra", "got 'spectra'$"),
    ],
)
def test_a_kind_that_is_none(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(SiteFileError, match=rf"'datasets.blood.kind': expected 'volumes' or .*{words}"):
        load_site_file(declare(tmp_path, "anna", kind))
