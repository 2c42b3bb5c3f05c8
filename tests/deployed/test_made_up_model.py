# SPDX-License-Identifier: Apache-2.0
"""A model's file whose checksums are right and whose words do not fit each other: one sentence, from every verb."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medpfl.core.errors import MedPFLError
from medpfl.deployed.export import export
from medpfl.deployed.model_file import ModelMeta, load_deployed, read_model
from medpfl.deployed.predict import predict
from small_jobs import small_job, write_table_sites
from tools import run

pytestmark = pytest.mark.slow
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made_up")
    run(small_job(rounds=1), write_table_sites(folder / "sites", ["anna", "berta"]), folder)
    return folder


def made_up(left: Path, folder: Path, change: Change) -> Path:
    """The model with another history, sealed anew."""
    tensors, meta = read_model(left / "home" / "anna" / "small" / "models" / "personal-last.safetensors")
    history: dict[str, Any] = meta.model_dump(mode="json")["history"]
    change(history)
    assert meta.history is not None
    path = folder / "model.safetensors"
    unchecked = {name: history[name] for name in ("cases", "samples_by_class", "preparation")}
    ModelMeta.write(meta.model_copy(update={"history": meta.history.model_copy(update=unchecked)}), path, tensors)
    return path


def test_no_number_of_test_cases(left: Path, tmp_path: Path) -> None:
    model = made_up(left, tmp_path, lambda history: history["cases"].pop("test"))
    with pytest.raises(MedPFLError, match=r"what it says of itself is broken: 'history\.cases': .* of the test split$"):
        load_deployed(model)


@pytest.mark.parametrize("split", ["validation", "train"])
def test_a_split_without_classes_has_no_samples_of_them(split: str, left: Path, tmp_path: Path) -> None:
    model = made_up(left, tmp_path, lambda history: history["samples_by_class"].pop(split))
    export(model, tmp_path / "exported", "torchscript")
    assert "| test |" in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["features"].pop("a"),
        lambda found: found["mean"].pop(),
        lambda found: found["scale"].pop(),
        lambda found: found["scale"].__setitem__(0, 0.0),
        lambda found: found.update(mean=[float("nan")] * 3),
        lambda found: found["imputed"].update(a="x"),
        lambda found: found.pop("label"),
    ],
)
def test_a_preparation_that_does_not_fit_itself(change: Change, left: Path, tmp_path: Path) -> None:
    model = made_up(left, tmp_path, lambda history: change(history["preparation"]))
    with pytest.raises(MedPFLError, match="cannot be prepared: the model's file has no hospital's preparation"):
        predict(load_deployed(model), left / "sites" / "anna.csv", tmp_path / "predicted")
