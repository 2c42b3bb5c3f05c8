# SPDX-License-Identifier: Apache-2.0
"""``medpfl compare`` as it is used: worker processes, resuming, a failing run, the results and the page.

One test starts worker processes, and what they compute is what this process computes.
"""

import csv
import hashlib
import html.parser
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import medpfl
from bounded_fedavg import BoundedFedAvg
from evaluating import evaluate_at
from medpfl.cli import app
from medpfl.compare.file import load_comparison
from medpfl.compare.plan import Plan, make_plan
from medpfl.compare.runner import do_runs
from medpfl.core.errors import MedPFLError
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import evaluate_on_all
from medpfl.tasks import Tabular
from small_jobs import write_table_sites

pytestmark = pytest.mark.slow

FILE: dict[str, Any] = {
    "name": "small",
    "task": {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood", "hidden": [4]}},
    "rounds": 3,
    "seeds": [0, 1],
    "steps": 5,
    "lr": 0.05,
    "finetune": 2,
    "methods": {"Bounded": {"path": "bounded_fedavg.BoundedFedAvg", "args": {"bound": 0.5}}},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return path


def compare(folder: Path, output: str, jobs: int = 2, **changes: Any) -> Any:
    arguments = ["compare", str(write(folder, **changes)), "--sites", str(folder / "sites")]
    arguments += ["-o", str(folder / output), "--jobs", str(jobs)]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def do(plan: Plan, results: Path, jobs: int) -> dict[str, str]:
    return do_runs(plan, results, jobs, lambda run, reason: None, lambda rounds: None)


def outcomes(results: Path) -> dict[str, Any]:
    """What every run computed, its deployed models' bytes included, without times."""
    found = {}
    for path in sorted((results / "runs").glob("*/run.json")):
        content = json.loads(path.read_text())
        content["models"] = {
            str(model.relative_to(path.parent)): hashlib.sha256(model.read_bytes()).hexdigest()
            for model in path.parent.rglob("models/*.safetensors")
        }
        content.pop("seconds", None), content.pop("events", None)
        found[path.parent.name] = content
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Path:
    """A comparison that was run once, in this process; in the folder ``here``."""
    folder = tmp_path_factory.mktemp("compared")
    write_table_sites(folder / "sites")
    result = compare(folder, "here")
    assert result.exit_code == 0, result.output
    return folder


def test_the_python_api_takes_objects_and_reads_what_is_finished(done: Path) -> None:
    said = {**FILE, "task": Tabular(dataset="blood", hidden=(4,))}
    said["methods"] = {"Bounded": {"path": BoundedFedAvg, "args": {"bound": 0.5}}}
    before = outcomes(done / "here")
    compared = medpfl.compare(said, done / "sites", done / "here")
    assert outcomes(done / "here") == before  # the same runs: nothing is trained again
    again = medpfl.load_result(done / "here")
    assert again.leaderboard.equals(compared.leaderboard) and {"Local", "FedAvg", "Bounded"} <= {
        *again.leaderboard.index
    }
    assert (
        len(compared.runs.query("method == 'Bounded'")) == 2 and list(compared.hospitals) == compared.content.hospitals
    )
    assert compared.figures["curves"].startswith("<svg")


def test_a_killed_comparison_of_processes_goes_on_and_equals_the_one_in_process(done: Path) -> None:
    results = done / "processes"
    command = [sys.executable, "-c", "from medpfl.cli import main; main()", "compare", str(write(done, seeds=[0]))]
    command += ["--sites", str(done / "sites"), "-o", str(results), "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list(results.glob("runs/*/run.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in results.glob("runs/*/run.json")}
    assert 1 <= len(before) < 3
    result = compare(done, "processes", seeds=[0])
    assert result.exit_code == 0 and f"{len(before)} of 3 runs are done already" in result.output
    assert {path: path.stat().st_mtime_ns for path in before} == before  # not repeated
    assert not list(results.glob("runs/*.part"))
    found, here = outcomes(results), outcomes(done / "here")
    assert len(found) == 3 and all(content == here[digest] for digest, content in found.items())


def test_a_changed_file_makes_new_runs_beside_the_old(done: Path) -> None:
    shutil.copytree(done / "here", done / "changed")
    result = compare(done, "changed", methods={}, finetune=1)
    assert result.exit_code == 0 and "2 of 4 runs are done already" in result.output  # Local's two
    assert len(outcomes(done / "changed")) == 8
    rows = json.loads((done / "changed" / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["Local", "FedAvg", "FedAvg before the mean", "FedAvg + fine-tuning"]


def test_results_hold_what_the_runs_found(done: Path) -> None:
    results = json.loads((done / "here" / "results.json").read_text())
    rows = {row["name"]: row for row in results["rows"]}
    assert (
        list(rows) == ["Local", "FedAvg", "FedAvg before the mean", "FedAvg + fine-tuning", "Bounded"]
        and not results["failures"]
    )
    assert len({run["initial"]["digest"] for run in results["runs"] if run["seed"] == 0}) == 1
    assert rows["Local"]["bytes"] == {"to_site": 0, "from_site": 0} and rows["Local"]["gain"] is None
    assert rows["FedAvg"]["bytes"]["from_site"] == 4 * (3 * 4 + 4 + 4 * 1 + 1)  # float32 weights of 3-4-1
    digest = next(run["digest"] for run in results["runs"] if (run["method"], run["seed"]) == ("Bounded", 1))
    home = done / "here" / "runs" / digest / "home"
    union = []
    for row, site in enumerate(results["hospitals"]):
        model = load_deployed(home / site / "compared" / "models" / "common-best.safetensors")
        score = evaluate_at(model, load_site_file(done / "sites" / f"{site}.yaml", site), "test").metrics["accuracy"]
        assert rows["Bounded"]["hospitals"][site]["best"]["values"][1] == pytest.approx(score, abs=1e-6)
        assert rows["Bounded"]["cross"][row][row] == pytest.approx(rows["Bounded"]["hospitals"][site]["best"]["mean"])
        expected = np.subtract(
            rows["Bounded"]["hospitals"][site]["best"]["values"], rows["Local"]["hospitals"][site]["best"]["values"]
        )
        assert rows["Bounded"]["hospitals"][site]["gain"]["mean"] == pytest.approx(expected.mean(), abs=1e-6)
        data = {each: model.task.load(load_site_file(done / "sites" / f"{each}.yaml")) for each in results["hospitals"]}
        union.append(evaluate_on_all(model, data, "test")[1].metrics)
    assert np.sum(rows["Bounded"]["mixing"]["slots"]["model"], axis=1) == pytest.approx(np.ones(4), abs=1e-5)
    for name, values in rows["Bounded"]["together"].items():
        assert values["values"][1] == pytest.approx(np.mean([metrics[name] for metrics in union]), abs=1e-6)
    assert results["smallest_p"] == 0.5
    text = (done / "here" / "results.md").read_text()
    assert "| Bounded |" in text and "smallest possible is 0.5" in text
    by_hospital = {site: scores["best"] for site, scores in rows["Bounded"]["hospitals"].items()}
    assert rows["Bounded"]["metrics"]["accuracy"] == {**rows["Bounded"]["best"], "hospitals": by_hospital}
    assert set(rows["Bounded"]["metrics"]) == {"accuracy", "auc", "balanced_accuracy"}
    assert "| method | accuracy | balanced accuracy | auc |" in text.split("## All metrics")[1]
    assert f"| {rows['FedAvg']['together']['auc']['mean']:.3f} ± " in text.split("cases together")[1]


def test_one_failing_method_is_told_and_the_others_go_on(done: Path) -> None:
    shutil.copytree(done / "here", done / "failing")
    wild = {"path": "bounded_fedavg.BoundedFedAvg", "args": {"lr": 1e38, "optimizer": "sgd", "bound": 1e38}}
    others = {"SM": {"path": "medpfl.methods.fedsm.FedSM"}, "Broken": {"path": "bounded_fedavg.Broken"}}
    result = compare(done, "failing", seeds=[0], methods={"Wild": wild, **FILE["methods"], **others})
    output = " ".join(result.output.split())
    assert result.exit_code == 1 and "Traceback" not in output
    assert "Wild, seed 0 failed: round" in output and "holds NaN or infinite values" in output
    results = json.loads((done / "failing" / "results.json").read_text())
    assert [failure["run"] for failure in results["failures"]] == ["Wild, seed 0", "Broken, seed 0"]
    assert "Broken, seed 0 failed: KeyError: 'modle'" in output and "log.txt" in output
    assert {"Bounded", "SM", "SM (global)"} < {row["name"] for row in results["rows"]}  # every deployed model is a row
    assert all(row["gain"]["p"] is None for row in results["rows"] if row["gain"])  # one seed says nothing
    page = (done / "failing" / "report.html").read_text()
    assert "Wild, seed 0" in page and "<h2>Gain over local training" in page


@pytest.mark.usefixtures("in_process")
def test_data_that_change_meanwhile_stop_the_run(tmp_path: Path) -> None:
    files = write_table_sites(tmp_path / "sites")
    plan = make_plan(load_comparison(write(tmp_path, seeds=[0], methods={})), files)
    table = tmp_path / "sites" / "clara.csv"
    table.write_text(table.read_text().rsplit("\n", 2)[0] + "\n")
    failures = do(plan, tmp_path / "results", 2)
    assert len(failures) == 2 and all("clara's data or split changed" in reason for reason in failures.values())


def test_two_comparisons_cannot_share_a_folder(tmp_path: Path) -> None:
    import fcntl

    plan = make_plan(load_comparison(write(tmp_path)), write_table_sites(tmp_path / "sites"))
    (tmp_path / "results" / "runs").mkdir(parents=True)
    with open(tmp_path / "results" / "runs" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MedPFLError, match="another comparison is running in"):
            do(plan, tmp_path / "results", 1)


class _Page(html.parser.HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        assert tag not in ("script", "link", "iframe")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_loads_nothing(done: Path) -> None:
    source = (done / "here" / "report.html").read_text()
    page = _Page()
    page.feed(source)
    tables = [unquote(target) for target in page.loads if target.startswith("data:text/csv")]
    assert len(tables) == 4 and all(target.startswith(("#", "data:text/csv")) for target in page.loads)
    assert "url(http" not in source and "@import" not in source
    text = " ".join(" ".join(page.text).split())
    content = json.loads((done / "here" / "results.json").read_text())
    (split,) = content["splits"]
    for site, counts in split["labels"].items():
        assert list(counts) == ["no", "yes"] and sum(counts.values()) == sum(split["sizes"][site].values())
    rows = list(csv.DictReader(io.StringIO(tables[1].partition("\ufeff")[2])))
    found = {(row["method"], row["hospital"]): row for row in rows}
    assert len(found) == sum(len(row["hospitals"]) for row in content["rows"])
    for row in content["rows"]:
        for site, stored in row["hospitals"].items():
            assert float(found[row["name"], site]["test accuracy, best round"]) == stored["best"]["mean"]
            low = stored["gain"]["interval"][0] if stored["gain"] else None
            assert found[row["name"], site]["gain 95 % from"] == ("" if low is None else str(low))
    runs = list(csv.DictReader(io.StringIO(tables[2].partition("\ufeff")[2])))
    assert len(runs) == sum(len(row["pairs"]) for row in content["rows"])
    for words in (
        "Leaderboard: test accuracy",
        "Who has which labels",
        "Gain over local training",
        "Who learnt from whom",
        "on all hospitals' test cases together",
        "Calibration",
        "Cost",
    ):
        assert words in text
    assert "Macro" not in text and "Undefined" not in text and " nan" not in text
    assert "the smallest p it can give is 0.5, so nothing here can be" in text


def test_the_page_fits_a_phone(done: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    # A window cannot be narrower than 500 px; a frame in it can.
    shutil.copy(done / "here" / "report.html", tmp_path / "report.html")
    script = (
        "const d=document.querySelector('iframe').contentDocument.documentElement;"
        "document.title='width '+d.scrollWidth+' of '+d.clientWidth+', tables '+d.querySelectorAll('table').length"
    )
    frame = f'<iframe src="report.html" width="390" height="800" onload="{script}"></iframe>'
    (tmp_path / "phone.html").write_text(f"<title>waiting</title>{frame}")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    shown = subprocess.run([*command, f"file://{tmp_path / 'phone.html'}"], capture_output=True, text=True, timeout=120)
    title = shown.stdout.partition("<title>")[2].partition("</title>")[0]
    width, _, rest = title.removeprefix("width ").partition(" of ")
    assert width and width == rest.partition(",")[0], f"the page is wider than a phone: {title}"
    assert int(title.rpartition(" ")[2]) > 8
