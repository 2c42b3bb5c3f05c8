# SPDX-License-Identifier: Apache-2.0
"""What is installed where: the wheel, its dependencies with their ranges, and what a hospital leaves out."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from medpfl.bundle import manifest
from medpfl.core.errors import ConfigError, DataError
from medpfl.data.cells import Cells, read_cells
from medpfl.data.declared import Problems
from medpfl.licences import UNKNOWN, licences
from medpfl.tasks import Survival

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, list[str]]:
    """Extra ("": none) to what it needs."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": content["dependencies"], **content["optional-dependencies"]}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_every_dependency_has_a_range_that_holds_its_tested_version(project: dict[str, list[str]]) -> None:
    tested = {**pins("requirements.txt"), **pins("constraints.txt")}
    wanted = {name: Requirement(text) for extra in project if extra != "test" for text in project[extra]
              if (name := Requirement(text).name) != "medpfl"}  # fmt: skip
    assert set(wanted) == set(tested)
    for name, requirement in wanted.items():
        operators = {one.operator for one in requirement.specifier}
        assert ">=" in operators and "==" not in operators, requirement
        assert requirement.specifier.contains(tested[name]), requirement
    (others,) = (Requirement(text).extras for text in project["all"])
    assert others == set(project) - {"", "all", "docs", "mlflow", "test", "wandb"}


def test_the_page_names_every_extra_and_what_it_installs(project: dict[str, list[str]]) -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `?(\w+)`? \| ([^|]+) \|([^|]*)\|$", page, flags=re.MULTILINE)
    told = {extra: packages for extra, _, packages in rows if extra != "extra"}
    assert set(told) == {"base", *project} - {"", "test"}
    for extra, packages in told.items():
        wanted = {Requirement(text).name.lower() for text in project["" if extra == "base" else extra]}
        named = {re.sub(r" \(.*?\)|;.*", "", name).strip().lower() for name in packages.split(",") if name.strip()}
        indirect = {"pyjpegls", "mkdocstrings-python"}  # what highdicom and mkdocstrings bring
        assert named <= wanted | indirect and (extra in ("base", "all") or wanted <= named | indirect), extra


def test_the_page_on_python_adds_what_the_first_command_did_not_install(project: dict[str, list[str]]) -> None:
    """The notebooks compare and are opened in Jupyter; ``./poc/run`` installs what requirements.txt names."""
    there, page = pins("requirements.txt"), (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert {Requirement(text).name for text in project["compare"]} - set(there), "nothing is lacking"
    assert ".venv/bin/pip install -c constraints.txt -e '.[compare]' notebook" in page
    assert {Requirement(text).name for text in project["privacy"]} - set(there)
    assert "softpull_heart_private (extra privacy)" in (ROOT / "requirements.txt").read_text()


def test_versions_in_the_manifest_are_the_pinned_ones() -> None:
    tested = manifest(ROOT).tested_with
    for package in ("nvflare", "torch", "monai"):
        assert tested[package] == pins("requirements.txt")[package]


def test_what_needs_an_extra_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("torchsurv", "pyarrow", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"the task Survival needs torchsurv.*pip install 'medpfl\[survival\]'"):
        Survival(dataset="heart", horizons=(1.0,))
    file = tmp_path / "patients.parquet"
    file.touch()
    with pytest.raises(DataError, match=r"patients.parquet: a Parquet file needs pyarrow.*'medpfl\[parquet\]'") as told:
        list(read_cells(file, file.name, Cells(), Problems("site"), ["age"]))
    assert "patients" not in told.value.public  # names of a hospital's files stay there


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what pip installs of the wheel that the checkout builds."""
    builders = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert f"{Path(wheel).name}, {Path(wheel).stat().st_size / 1e6:.1f} MB" in page
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.slow
def test_the_wheel_holds_the_package_the_jobs_and_nothing_beside(installed: Path) -> None:
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"medpfl"}
    bundle = installed / "medpfl" / "_bundle"
    for name in ("jobs", "custom/medpfl"):
        there = installed / "medpfl" if name == "custom/medpfl" else bundle / "jobs"
        files = {path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*") if path.is_file()}
        ours = {path for path in files if "__pycache__" not in path.parts and not path.name.startswith(".__nvfl_")}
        got = {path.relative_to(there) for path in there.rglob("*") if path.is_file()}
        assert {path for path in got if "_bundle" not in path.parts} >= ours
    assert manifest(bundle) == manifest(ROOT)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def medpfl(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "medpfl", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "softpull_phantom" in medpfl("jobs")
    packed = Path(medpfl("pack", "softpull_phantom", "-o", "packed").strip())
    assert (tmp_path / packed / "app" / "custom" / "medpfl" / "flare" / "executor.py").is_file()
    assert not (tmp_path / packed / "app" / "custom" / "medpfl" / "_bundle").exists()
    medpfl("provision", "--example", "project.yml")
    assert (tmp_path / "project.yml").read_text() == (ROOT / "poc" / "project.yml").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"packed", "project.yml"}


@pytest.mark.slow
def test_licences_of_everything_that_is_needed() -> None:
    found = {one.name: one.licence for one in licences(extras=frozenset())}
    assert {"medpfl", "torch", "nvflare", "numpy", "grpcio"} <= set(found) and "pytest" not in found
    assert found["medpfl"] == "Apache-2.0" and UNKNOWN not in (found["torch"], found["nvflare"])
    assert "pytest" in {one.name for one in licences()}
    code = (
        "import importlib_metadata; from medpfl.licences import licences; print(len(licences()))"  # as Dask's loop does
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(licences())
