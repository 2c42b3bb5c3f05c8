# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' command, verb by verb, with the smallest sizes."""

import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import augmenting, gpu, gpu_order
from benchmarks.__main__ import app, verbs
from medpfl.models.memory_order import faulty_here

ROOT = Path(__file__).resolve().parents[2]
HEART = Path(os.environ.get("MEDPFL_HEART_DATA", ROOT.parent / "shared" / "data" / "uci_heart"))
HIPPOCAMPUS = Path(os.environ.get("MEDPFL_HIPPOCAMPUS", ROOT.parent / "shared/data/hippocampus/hippocampus.zip"))
FLAMBY = ROOT.parent / "shared" / "data" / "flamby_results"


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.slow
def test_every_benchmark_has_a_verb_and_makes_its_tables() -> None:
    """Imported here, because most are too long to be run by a test."""
    found = verbs()
    assert {"mixing", "privacy-skin", "convolutions"} <= set(found) and not {"common", "studies", "split"} & set(found)
    for verb, name in found.items():
        module = importlib.import_module(name)
        assert verb in ("fuzz", "convolutions") or (callable(module.table_of) and callable(module.measure))
        assert "--help" in bench(verb, "--help")
    assert all(verb in bench("--help") for verb in (*found, "table", "split"))
    importlib.import_module("benchmarks.empty")


@pytest.mark.slow
def test_bench_mixing_measures_and_agrees_with_float64(tmp_path: Path) -> None:
    bench("mixing", "--sites", "3", "--values", "5000", "--repeats", "1", "--out", str(tmp_path / "m.json"))
    found = json.loads((tmp_path / "m.json").read_text())
    assert max(found["worst_error"].values()) < 1e-5 and found["to_cloning"]["clone"] == 1.0


@pytest.mark.slow
def test_bench_scale_measures_each_point_in_a_process_of_its_own(tmp_path: Path) -> None:
    bench("scale", "--few", "--folder", str(tmp_path), "--out", str(tmp_path / "s.json"))
    server, whole = json.loads((tmp_path / "s.json").read_text())["points"]
    assert server["on_disk"] and server["peak_mb"] < server["before_mb"] + 100 and server["state_mb"] > 15
    assert whole["hospitals"] == 4 and whole["seconds_a_round"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


@pytest.mark.slow
def test_bench_choice_measures_regret_against_what_is_known_to_be_true(tmp_path: Path) -> None:
    bench("choice", "--hospitals", "8", "--out", str(tmp_path / "c.json"))
    found = {
        (one["patients"], one["true"]): one["rules"] for one in json.loads((tmp_path / "c.json").read_text())["found"]
    }
    assert all(regret == 0 for regret, _ in found[8, "none gains"].values())  # whatever is taken is worth as much
    assert found[8, "none gains"]["the best score"][1] > found[8, "none gains"]["shipped"][1]
    assert found[50, "all gain"]["shipped"] == [0, 1] and found[50, "all lose"]["shipped"] == [0, 0]


@pytest.mark.slow
def test_bench_augmenting_makes_batches_once_for_all_networks_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs, *_, volumes = augmenting._settings()
    monkeypatch.setattr(augmenting, "_settings", lambda: [photographs, volumes])
    monkeypatch.setattr(augmenting, "_STEPS", 2)
    bench("augmenting", "--repeats", "1", "--out", str(tmp_path / "a.json"))
    found = json.loads((tmp_path / "a.json").read_text())["settings"]
    assert all(one["ratios"]["first network"] > one["ratios"]["next network"] for one in found)


@pytest.mark.slow
def test_bench_gpu_measures_on_the_processor_too(tmp_path: Path) -> None:
    bench("gpu", "--repeats", "1", "--no-flare", "--out", str(tmp_path / "g.json"))
    found = json.loads((tmp_path / "g.json").read_text())
    assert len(found["settings"]) == 8 and all(one["ours_to_bare"] > 0.2 for one in found["settings"])
    assert all(0 < one["of_roof"] < 1.5 for one in found["settings"])  # a busy machine measures a low roof
    methods = found["methods"]
    assert methods["Local"] == 1.0 and methods["Ditto"] > 1.2  # two networks instead of one
    assert len(methods) == 25 and not any(isinstance(one, str) for one in methods.values()), methods
    orders = found["order"]  # of volumes
    assert ("failed" in orders) == faulty_here()
    if not faulty_here():
        assert len(orders) == 6 and all(one["plain"] > 0 and one["last"] > 0 for one in orders.values())
        assert all(one["apart"] < (1e-4 if name.endswith("fp32") else 0.05) for name, one in orders.items()), orders
        assert len(gpu_order.told_of_orders(orders).splitlines()) == 4 + 2 + 6


def test_bench_gpu_keeps_what_it_measured_before_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = gpu.loads(True)[3:]
    monkeypatch.setattr(gpu, "loads", lambda small: tables)

    def stopped(*_: int) -> dict[str, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "method_rounds", stopped)
    file = tmp_path / "g.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.command(1, True, False, file)
    found = json.loads(file.read_text())
    assert [one["precision"] for one in found["settings"]] == ["fp32", "bf16"]
    assert "tables of 32 columns" in gpu.table_of(found)


def test_volumes_are_not_measured_in_an_order_that_damages_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_order, "faulty_here", lambda: True)
    assert "damage memory" in gpu_order.told_of_orders(gpu_order.orders(torch.device("cpu"), 1, True))


@pytest.mark.slow
@pytest.mark.skipif(not HIPPOCAMPUS.exists(), reason="the hippocampus data are absent")
def test_bench_caching_loads_what_is_kept_faster(tmp_path: Path) -> None:
    options = ("--data", str(HIPPOCAMPUS), "--volumes", "8", "--repeats", "1", "--out", str(tmp_path / "c.json"))
    bench("caching", *options)
    found = json.loads((tmp_path / "c.json").read_text())["settings"]
    assert len(found) == 4 and all(one["to_without"]["afterwards"] < 0.8 and one["kept_mb"] > 1 for one in found)


@pytest.mark.slow
def test_bench_reading_streams_what_exceeds_the_budget(tmp_path: Path) -> None:
    options = ("--images", "120", "--repeats", "1", "--budget-mb", "20", "--out", str(tmp_path / "r.json"))
    bench("reading", *options)
    found = json.loads((tmp_path / "r.json").read_text())
    memory = found["memory"]
    assert memory["data_mb"] > 3 * memory["budget_mb"] and memory["grown_mb"] < memory["budget_mb"] + 40
    assert found["to_training"]["batches from the scratch file"] > 5 and found["to_training"]["batches from memory"] > 5


@pytest.mark.slow
@pytest.mark.skipif(
    not HEART.is_dir() or not FLAMBY.is_dir(), reason="the UCI heart data or FLamby's results are absent"
)
def test_bench_heart_meets_flambys_figures(tmp_path: Path) -> None:
    """One seed of the study: pooled, local and FedAvg accuracies, centre by centre, as FLamby published them."""
    from benchmarks.heart import one_seed, read_published
    from medpfl.demo.heart import write_heart

    write_heart(tmp_path / "sites", HEART, "flamby")
    found = one_seed(42, 42, tmp_path / "sites", tmp_path / "runs")  # from FLamby's weights; the study has ours, too
    published = read_published(FLAMBY, [42])
    compared = 0
    for method, centres in published.items():
        for centre, values in centres.items():
            rows = {"cleveland": 104, "hungary": 89, "switzerland": 16, "long-beach": 45}[centre]
            assert abs(found[method][centre] - values[0]) < 1.01 / rows, (method, centre)  # one test row at most
            compared += 1
    assert compared == 12
