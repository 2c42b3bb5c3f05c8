# SPDX-License-Identifier: Apache-2.0
"""The manifest is true, and FLARE itself accepts every shipped job."""

import json
from pathlib import Path

import pytest
import yaml
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

import medpfl
from medpfl.bundle import demo_of, find_job, manifest, prepare_demo
from medpfl.core.errors import ConfigError, DataError
from medpfl.demo.known import DEMOS
from medpfl.flare.allow import component_classes
from medpfl.job import load_job

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted(path.name for path in (ROOT / "jobs").iterdir())


def test_the_manifest_lists_exactly_the_jobs() -> None:
    content = manifest(ROOT)
    assert sorted(content.jobs) == JOBS
    assert content.version == medpfl.__version__
    for name, entry in content.jobs.items():
        assert entry.demo in (*DEMOS, None)
        assert entry.method == type(load_job(ROOT / "jobs" / name).method).__name__


def test_what_people_cite_is_this_version_and_the_methods_pages_papers() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == medpfl.__version__
    pages = " ".join(" ".join(page.read_text().split()) for page in (ROOT / "docs" / "methods").glob("*.md"))
    assert len(cited["references"]) == 5
    for paper in cited["references"]:
        assert f"*{paper['title']}*" in pages
        assert paper["authors"][0]["family-names"] in pages


@pytest.mark.parametrize("job", JOBS)
def test_flare_accepts_the_job(job: str) -> None:
    valid, error, meta = JobMetaValidator().validate(job, zip_directory_to_bytes(str(ROOT / "jobs"), job))
    assert valid, error
    assert meta["name"] == job


@pytest.mark.parametrize("job", JOBS)
def test_every_class_of_the_job_is_on_the_allow_list(job: str) -> None:
    allowed = component_classes()

    def paths(value: object) -> list[str]:
        if isinstance(value, dict):
            return [v for k, v in value.items() if k == "path"] + [p for v in value.values() for p in paths(v)]
        return [p for v in value for p in paths(v)] if isinstance(value, list) else []

    for file in (ROOT / "jobs" / job / "app" / "config").glob("*.json"):
        for path in paths(json.loads(file.read_text())):
            assert path in allowed


def test_allowed_classes_take_no_path_url_or_code() -> None:
    """No component a job may build has an argument that could be a file, a URL or something to run."""
    import importlib
    import inspect
    import typing
    from collections.abc import Callable as AbstractCallable

    for name in component_classes():
        module, _, attribute = name.rpartition(".")
        kind = getattr(importlib.import_module(module), attribute)
        assert isinstance(kind, type)
        hints = typing.get_type_hints(kind.__init__)
        for parameter in inspect.signature(kind).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                continue  # the controller's, checked by Settings
            hint = hints.get(parameter.name, typing.Any)
            flat = str(hint)
            assert "Path" not in flat and hint is not AbstractCallable and "Callable" not in flat, (name, parameter)
            if hint is str:
                # Names that the site file declares, and one of the task's metrics.
                declared = ("dataset", "public", "checkpoint", "score", "unit")
                assert parameter.name in declared, f"{name}: text argument '{parameter.name}' needs a closer look"


def test_an_unknown_job_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no job 'nothing'.*softpull_phantom"):
        find_job("nothing")


def test_a_job_without_demo_data_asks_for_site_files() -> None:
    with pytest.raises(ConfigError, match=r"'fedsm_prostate' has no demo data: .*; give its site files with --sites"):
        demo_of("fedsm_prostate")
    with pytest.raises(ConfigError, match=r"'mine' is not in meta\.json, so it has no demo data"):
        demo_of("mine")
    assert demo_of("fedsm_skin_lesion") == "skin"


@pytest.mark.slow
def test_demo_data_are_made_once_and_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "phantom"
    assert prepare_demo("phantom", folder) == ["hospital-a", "hospital-b", "hospital-c", "hospital-d"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nii.gz")}
    prepare_demo("phantom", folder)  # a second run, perhaps while the first one reads
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nii.gz")} == before
    (folder / ".made-by-medpfl").write_text("another version")
    prepare_demo("phantom", folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nii.gz")} != before
    assert [path.name for path in tmp_path.iterdir()] == ["phantom"]
    monkeypatch.setenv("MEDPFL_HEART_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="Download"):
        prepare_demo("heart", tmp_path / "heart")
    assert [path.name for path in tmp_path.iterdir()] == ["phantom"]
    with pytest.raises(DataError, match="cannot write the demo data into"):
        prepare_demo("phantom", folder / "hospital-a.yaml" / "sub")
