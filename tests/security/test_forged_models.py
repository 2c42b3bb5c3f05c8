# SPDX-License-Identifier: Apache-2.0
"""A model's file that somebody made up: enormous networks, foreign classes. One sentence refuses it, at no cost."""

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medpfl import store
from medpfl.component import spec_of
from medpfl.core.errors import MedPFLError
from medpfl.deployed.model_file import ModelMeta, Recipe, load_deployed
from medpfl.methods.fedavg import FedAvg
from medpfl.tasks.tabular import Tabular


def forged(folder: Path, task: Any = None, method: Any = None, hospitals: int = 2, shape: Any = (3,)) -> Path:
    recipe = Recipe(
        method=method or spec_of(FedAvg()),
        task=task or spec_of(Tabular(dataset="blood", hidden=(4,))),
        deployed="fedavg",
        classes=["no", "yes"],
        input_shape=list(shape),
        hospitals=hospitals,
    )
    meta = ModelMeta(recipe=recipe, history=None, parameters=1, versions={})
    path = folder / "model.safetensors"
    meta.write(path, {"fedavg.0.weight": torch.zeros(1)})
    return path


@pytest.mark.parametrize(
    "recipe",
    [
        {"task": spec_of(Tabular(dataset="blood", hidden=(30_000, 30_000)))},
        {"task": spec_of(Tabular(dataset="blood", hidden=(10,) * 100_000))},
        {"shape": (2_000_000_000,)},
    ],
    ids=["wide", "deep", "long"],
)
@pytest.mark.slow
def test_a_small_file_that_asks_for_enormous_networks(tmp_path: Path, recipe: dict[str, Any]) -> None:
    path = forged(tmp_path, **recipe)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(MedPFLError, match=r"networks have more than"):
        load_deployed(path)
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_small_file_of_very_many_hospitals(tmp_path: Path) -> None:
    path, meta = tmp_path / "model.safetensors", store.read(forged(tmp_path))[1]
    meta["recipe"] = {**meta["recipe"], "hospitals": 10**8}  # type: ignore[dict-item]
    store.save(path, {"fedavg.0.weight": torch.zeros(1)}, meta)
    started = time.process_time()
    with pytest.raises(MedPFLError, match=r"what it says of itself is broken: 'recipe\.hospitals'"):
        load_deployed(path)
    assert time.process_time() - started < 5


def test_what_a_file_says_of_itself_is_nested_without_end(tmp_path: Path) -> None:
    """Its checksums are right; Python's reader of JSON gives up with a RecursionError."""
    text, none = '{"format": 2, "recipe": ' + "[" * 100_000 + "]" * 100_000 + "}", store.fingerprint({})
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"medpfl": f"{store._sum(text, none)} {none} {text}"})
    with pytest.raises(store.DamagedFile, match=r"cannot read .*model\.safetensors: it is damaged: maximum recursion"):
        load_deployed(path)


@pytest.mark.parametrize(
    "path",
    ["antigravity.FedAvg", "subprocess.Popen", "medpfl.store.read", "os.system", "medpfl." + "a." * 3000 + "FedAvg"],
    ids=["another", "Popen", "function", "system", "endless"],
)
def test_a_file_that_names_another_class(tmp_path: Path, path: str) -> None:
    with pytest.raises(MedPFLError, match=r"is not MedPFL's|is no Method|is not a class|must be a full class name"):
        load_deployed(forged(tmp_path, method={"path": path}))
