# SPDX-License-Identifier: Apache-2.0
"""The command ``medpfl``, verb by verb."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.flare.allow import component_classes

ROOT = Path(__file__).resolve().parents[2]
HEART = Path(os.environ.get("MEDPFL_HEART_DATA", ROOT.parent / "shared" / "data" / "uci_heart"))
FLAMBY = ROOT.parent / "shared" / "data" / "flamby_results"


def medpfl(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_jobs_and_check_job() -> None:
    assert "softpull_heart" in medpfl("jobs")
    assert "softpull_phantom is valid" in medpfl("check-job", "softpull_phantom")


def test_demo_and_pack(tmp_path: Path) -> None:
    assert "hospital-a, hospital-b" in medpfl("demo", "phantom", str(tmp_path / "demo"))
    assert yaml.safe_load((tmp_path / "demo" / "hospital-d.yaml").read_text())["site"] == "hospital-d"
    medpfl("pack", "softpull_heart", "-o", str(tmp_path))
    stamp = json.loads((tmp_path / "softpull_heart" / "app" / "custom" / "medpfl_pack.json").read_text())
    assert stamp["manifest"]["method"] == "SoftPull"


def test_site_allow_adds_to_what_the_kit_allows(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    before = {"format_version": 2, "class_allow_list": ["nvflare.a.B"], "components": [{"id": "x"}]}
    (tmp_path / "local" / "resources.json.default").write_text(json.dumps(before))
    for _ in range(2):  # safe to repeat
        medpfl("site", "allow", str(tmp_path), "--class", "medpfl.bench.empty.Empty")
    after = json.loads((tmp_path / "local" / "resources.json").read_text())
    assert after["components"] == before["components"] and after["class_list_enforcement_mode"] == "enforce"
    assert set(after["class_allow_list"]) == {"nvflare.a.B", "medpfl.bench.empty.Empty", *component_classes()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check-job", "nothing"], "there is no job 'nothing'"),
        (["site", "allow", "nowhere"], "is not a server's or hospital's startup kit"),
        (["report", "nowhere"], "nowhere is not a results folder"),
        (["simulate", "softpull_phantom", "--sites", "nowhere"], "--sites: nowhere is not a folder"),
        (["demo", "heart", "x", "--split", "half"], "--split must be flamby or validated, got 'half'"),
    ],
)
def test_one_sentence_and_no_traceback(arguments: list[str], words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from medpfl.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("medpfl: ") and words in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["subprocess.run", "nothing.Here", "os."])
def test_site_allow_refuses_what_is_no_class(tmp_path: Path, name: str) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "resources.json.default").write_text("{}")
    command = [sys.executable, "-c", "from medpfl.cli import main; main()", "site", "allow", str(tmp_path)]
    done = subprocess.run([*command, "--class", name], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"'{name}' cannot be allowed" in done.stderr, done.stderr
    assert not (tmp_path / "local" / "resources.json").exists()


def test_bench_mixing_measures_and_agrees_with_float64(tmp_path: Path) -> None:
    medpfl("bench", "mixing", "--sites", "3", "--values", "50000", "--repeats", "1", "--out", str(tmp_path / "m.json"))
    found = json.loads((tmp_path / "m.json").read_text())
    assert max(found["worst_error"].values()) < 1e-5 and found["to_cloning"]["clone"] == 1.0


def test_bench_reading_streams_what_exceeds_the_budget(tmp_path: Path) -> None:
    options = ("--images", "120", "--repeats", "1", "--budget-mb", "20", "--out", str(tmp_path / "r.json"))
    medpfl("bench", "reading", *options)
    found = json.loads((tmp_path / "r.json").read_text())
    memory = found["memory"]
    assert memory["data_mb"] > 3 * memory["budget_mb"] and memory["grown_mb"] < memory["budget_mb"] + 40
    assert found["to_training"]["batches from the scratch file"] > 5 and found["to_training"]["batches from memory"] > 5


@pytest.mark.skipif(
    not HEART.is_dir() or not FLAMBY.is_dir(), reason="the UCI heart data or FLamby's results are absent"
)
def test_bench_heart_meets_flambys_figures(tmp_path: Path) -> None:
    """One seed of the study: pooled, local and FedAvg accuracies, centre by centre, as FLamby published them."""
    from medpfl.bench.heart import measure, read_published

    found = measure(HEART, 1, FLAMBY, lambda text: None)["accuracy"]["flamby"]
    published = read_published(FLAMBY, [42])
    compared = 0
    for method, centres in published.items():
        for centre, values in centres.items():
            rows = {"cleveland": 104, "hungary": 89, "switzerland": 16, "long-beach": 45}[centre]
            assert abs(found[method][centre][0] - values[0]) < 1.01 / rows, (method, centre)  # one test row at most
            compared += 1
    assert compared == 12
