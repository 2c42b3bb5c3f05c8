# SPDX-License-Identifier: Apache-2.0
"""The time series task: its networks, its configuration, a small federation, and recordings that come afterwards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError, DataError
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.models.contract import Architecture
from medpfl.models.conv1d import Conv1d, Pamap2Cnn
from medpfl.models.selector import SmallCnn
from medpfl.tasks import TimeSeries
from medpfl.tasks.contract import Task
from tools import assert_same, run, write_job

SITES = ["anna", "berta", "clara"]


def write_sites(folder: Path) -> dict[str, Path]:
    """Hospitals with six recordings each: slow or fast oscillation, at an amplitude and noise of the hospital's own."""
    folder.mkdir()
    files = {}
    for number, site in enumerate(SITES):
        rng = np.random.default_rng(number)
        names = [f"{site}{subject}.csv" for subject in range(6)]
        for name in names:
            speed = np.repeat([0.3, 0.9], 60)
            phase = np.cumsum(speed) + rng.uniform(0, 6)
            x = (1 + number) * np.sin(phase) + 0.2 * rng.normal(size=120)
            y = np.cos(phase) + 5 * number
            table = pd.DataFrame({"x": x, "y": y, "gait": np.repeat(["slow", "fast"], 60)})
            table.to_csv(folder / name, index=False)
        dataset = {
            "kind": "series",
            "files": names,
            "channels": ["x", "y"],
            "label": {"column": "gait", "classes": {"slow": ["slow"], "fast": ["fast"]}},
            "window": {"length": 20, "step": 10},
        }
        files[site] = folder / f"{site}.yaml"
        # Of six recordings one is validated and one tested.
        content = {"site": site, "datasets": {"motion": dataset}, "policy": {"least_scored": 1}}
        files[site].write_text(yaml.safe_dump(content, sort_keys=False))  # the classes in their order
    return files


TASK = TimeSeries("motion", architecture=Conv1d(channels=(4, 8), kernel=5), score="auc")


@pytest.mark.slow
def test_a_federation_learns_and_gives_the_same_bits_twice(tmp_path: Path, make_job: Callable[..., Job]) -> None:
    sites = write_sites(tmp_path / "sites")
    job = make_job(rounds=4, task=TASK)
    one, other = (run(job, sites, tmp_path / name) for name in ("one", "other"))
    assert_same(one, other)
    assert any(key.endswith("running_mean") for key in one["slots"]["fedavg"])
    last = [line for line in one["test"] if line["choice"] == "last" and line["model"] in ("personal", "local")]
    assert len(last) == 6 and min(line["metrics"]["accuracy"] for line in last) > 0.8

    model = load_deployed(tmp_path / "one" / "home" / "berta" / "small" / "models" / "personal-last.safetensors")
    recording = pd.read_csv(tmp_path / "sites" / "berta0.csv")[["x", "y"]]
    (tmp_path / "new").mkdir()
    for name, part in (("slow", recording[:60]), ("fast", recording[60:])):
        part.to_csv(tmp_path / "new" / f"{name}.csv", index=False)
    rows = predict(model, tmp_path / "new", tmp_path / "predictions").rows
    assert [(row["case"], row["predicted"]) for row in rows] == [("fast.csv", "fast"), ("slow.csv", "slow")]
    for row, case in zip(rows, TASK.new_cases(tmp_path / "new", model.preparation), strict=True):
        windows = TASK.decide(model(case.inputs))
        assert len(windows) == 5 and row["p_fast"] == pytest.approx(float(windows[:, 1].mean()), abs=1e-5)


def test_the_configuration_of_a_nested_component_comes_back_as_it_was(tmp_path: Path, make_job: Any) -> None:
    spec = spec_of(TASK)
    assert spec["args"]["architecture"] == {
        "path": "medpfl.models.conv1d.Conv1d", "args": {"channels": [4, 8], "kernel": 5},
    }  # fmt: skip
    kept = json.loads(json.dumps(spec))
    assert build(kept, Task, "task") == TASK
    write_job(make_job(task=TASK), tmp_path / "job")  # reads it back and compares
    other = {"path": "medpfl.models.conv1d.Pamap2Cnn"}
    assert build({**kept, "args": {"dataset": "m", "architecture": other}}, Task, "task").architecture == Pamap2Cnn()
    assert build({**kept, "args": {"dataset": "m"}}, Task, "task").architecture == Conv1d()


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Conv1d", ["argument 'architecture'", "'Conv1d'"]),
        ({"path": "medpfl.tasks.Tabular", "args": {"dataset": "x"}}, ["is no Architecture"]),
        ({"path": "medpfl.models.contract.Architecture"}, ["abstract"]),
        ({"path": "medpfl.models.conv1d.Conv1d", "args": {"kernel": 4}}, ["Conv1d's kernel must be odd", "got 4"]),
        ({"path": "medpfl.models.conv1d.Conv1d", "args": {"channels": []}}, ["Conv1d's channels", "got []"]),
        ({"path": "medpfl.models.conv1d.Conv1d", "args": {"channels": [8, 0]}}, ["Conv1d's channels", "[8, 0]"]),
        ({"path": "medpfl.models.conv1d.Conv1d", "args": {"width": 4}}, ["unknown argument 'width' of Conv1d"]),
    ],
)
def test_architectures_refused(architecture: Any, words: list[str]) -> None:
    spec = {"path": "medpfl.tasks.TimeSeries", "args": {"dataset": "m", "architecture": architecture}}
    with pytest.raises(ConfigError) as caught:
        build(spec, Task, "task")
    for word in words:
        assert word in str(caught.value)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_the_network_of_fedap_for_pamap2_has_the_papers_layers() -> None:
    network = Pamap2Cnn().build((27, 200), 10)
    first, second = 27 * 16 * 9 + 16 + 2 * 16, 16 * 32 * 9 + 32 + 2 * 32  # convolutions and BatchNorms
    assert count(network) == first + second + (32 * 44 * 64 + 64) + (64 * 10 + 10) == 99_466
    assert network(torch.zeros(3, 27, 200)).shape == (3, 10)
    assert [m.num_features for m in network.modules() if isinstance(m, nn.BatchNorm1d)] == [16, 32]
    assert Pamap2Cnn().build((2, 28), 1)(torch.zeros(2, 2, 28)).shape == (2, 1)


def test_kernels_of_one_row_are_kernels_of_length_nine() -> None:
    """The paper writes the network for images of 1 x 200; the same weights give the same outputs here."""
    torch.manual_seed(0)
    ours = Pamap2Cnn().build((27, 200), 10).eval()
    layers: list[nn.Module] = []
    for layer in ours:  # type: ignore[union-attr]
        if isinstance(layer, nn.Conv1d):
            wide = nn.Conv2d(layer.in_channels, layer.out_channels, (1, 9))
            wide.load_state_dict({"weight": layer.weight.detach()[:, :, None], "bias": layer.bias})
            layers.append(wide)
        elif isinstance(layer, nn.BatchNorm1d):
            layers.append(nn.BatchNorm2d(layer.num_features))
        else:
            layers.append(nn.MaxPool2d((1, 2)) if isinstance(layer, nn.MaxPool1d) else layer)
    theirs = nn.Sequential(*layers).eval()
    inputs = torch.randn(4, 27, 200)
    torch.testing.assert_close(ours(inputs), theirs(inputs[:, :, None]))


def test_conv1d_takes_any_length_that_its_pooling_leaves_something_of() -> None:
    network = Conv1d((4, 6), kernel=3).build((2, 9), 3)
    assert count(network) == (2 * 4 * 3 + 8) + (4 * 6 * 3 + 12) + (6 * 3 + 3)
    for length in (2, 9, 50):
        assert network(torch.zeros(2, 2, length)).shape == (2, 3)
    for architecture, shape, words in (
        (Conv1d((4, 4, 4)), (2, 3), "3 blocks needs 4 time steps, got 3"),
        (Conv1d(), (3, 32, 32), r"Conv1d takes channels x length, got inputs of shape \(3, 32, 32\)"),
        (Pamap2Cnn(), (2, 27), "at least 28 time steps, got 27"),
        (Pamap2Cnn(), (5,), "Pamap2Cnn takes channels x length"),
    ):
        assert isinstance(architecture, Architecture)
        with pytest.raises(ConfigError, match=words):
            architecture.build(shape, 2)


def test_new_recordings_are_prepared_as_the_trained_ones(tmp_path: Path) -> None:
    sites = write_sites(tmp_path / "sites")
    data = TASK.load(load_site_file(sites["berta"]))
    kept = json.loads(data.preparation.model_dump_json())
    assert "berta" not in json.dumps(kept)
    test = data.splits["test"]
    file = test.names[0].split(":")[0]
    mine = [number for number, name in enumerate(test.names) if name.startswith(f"{file}:")]
    (tmp_path / "new").mkdir()
    recording = pd.read_csv(tmp_path / "sites" / file)
    recording[["y", "x"]].to_csv(tmp_path / "new" / "a.tsv", sep="\t", index=False)  # no label, another order
    recording.to_parquet(tmp_path / "new" / "b.parquet")
    (tmp_path / "new" / "._b.parquet").write_bytes(b"\0\5\x16\7Mac OS X")  # hidden, as Macs write it
    cases = list(TASK.new_cases(tmp_path / "new", kept))
    assert [case.name for case in cases] == ["a.tsv", "b.parquet"]
    for case in cases:
        assert case.inputs.shape == (11, 2, 20)  # 120 steps, the one across the two gaits included
        same = [any(torch.equal(window, one) for window in case.inputs) for one in test.inputs[:][mine]]
        assert len(same) == 10 and all(same)
    network = TASK.network(data).eval()
    assert TASK.decide(network(cases[0].inputs)).shape == (11, 2)
    with pytest.raises(DataError, match="cannot be prepared: the model's file has no hospital's preparation"):
        list(TASK.new_cases(tmp_path / "new", {}))
    with pytest.raises(DataError, match=r"nowhere\.csv: no such file"):
        list(TASK.new_cases(tmp_path / "nowhere.csv", kept))


def test_new_arrays_are_one_case_an_entry(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(2, 3, size=(12, 2, 8)).astype(np.float32)
    np.savez(tmp_path / "e.npz", x=x, y=np.arange(12) % 2)
    label = {"column": "y", "classes": {"no": [0], "yes": [1]}}
    dataset = {"kind": "series", "files": ["e.npz"], "inputs": "x", "label": label, "window": {"length": 4}}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"motion": dataset}}))
    data = TASK.load(load_site_file(tmp_path / "site.yaml"))
    np.savez(tmp_path / "new.npz", x=x[:, :, :7])
    cases = list(TASK.new_cases(tmp_path / "new.npz", data.preparation.model_dump()))
    assert [case.name for case in cases] == [f"new.npz[{number}]" for number in range(12)]
    assert all(case.inputs.shape == (1, 2, 4) for case in cases)
    used = int(data.splits["train"].names[0].removeprefix("e.npz[").split("]")[0])
    assert torch.equal(cases[used].inputs[0], data.splits["train"].inputs[0:1][0])
    np.savez(tmp_path / "new.npz", x=x[:, :1])
    with pytest.raises(DataError, match=r"new\.npz\[0\]: expected 2 channels, got 1"):
        list(TASK.new_cases(tmp_path / "new.npz", data.preparation.model_dump()))


def test_fedsms_selector_takes_series() -> None:
    torch.manual_seed(0)
    selector = SmallCnn().build((2, 20), 3)
    assert selector(torch.zeros(4, 2, 20)).shape == (4, 3) and not list(selector.buffers())
    assert sum(isinstance(module, nn.Conv1d) for module in selector.modules()) == 3
