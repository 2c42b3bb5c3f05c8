# SPDX-License-Identifier: Apache-2.0
"""The Python API: its names, and that importing it costs nothing. The notebooks run it (test_notebooks.py)."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import medpfl
from forked import Forked, forget

ROOT = Path(__file__).resolve().parents[2]


def test_public_names_and_their_types_are_the_same() -> None:
    stub = (ROOT / "custom" / "medpfl" / "__init__.pyi").read_text()
    typed = re.findall(r"^from ([\w.]+) import (\w+) as \2$", stub, flags=re.MULTILINE)
    assert {name for _, name in typed} == set(medpfl.__all__) - {"__version__"} <= set(dir(medpfl))
    for module, name in typed:
        assert getattr(medpfl, name) is not None, (module, name)
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        medpfl.simulated  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    """Every process of a job at a hospital imports it."""
    code = (
        "import sys; before = set(sys.modules); import medpfl; "
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['medpfl']"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["medpfl.compare.file", "medpfl"])
def test_the_package_compare_is_the_function_too(tmp_path: Path, first: str) -> None:
    def compare_twice() -> None:
        forget("medpfl")
        importlib.import_module(first)
        import medpfl

        for _ in range(2):
            with pytest.raises(Exception, match="comparison: 'name' is missing") as told:
                medpfl.compare({})
            assert isinstance(told.value, medpfl.MedPFLError)

    Forked(compare_twice, tmp_path / "log").ended()


def test_every_call_on_the_page_is_there() -> None:
    named = re.findall(r"`medpfl\.(\w+)[(`]", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"))
    assert len(set(named) & {"simulate", "compare", "check_data", "load_model"}) == 4
    assert set(named) <= {*medpfl.__all__, "__all__"}


def test_what_a_cell_of_a_notebook_shows_has_no_patients_values(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """A notebook keeps it: a check's own text had every number of every row in it, and a model's the means of these."""
    checked = medpfl.check_data(table_sites["anna"])
    assert repr(checked) == "DataCheck: These data can be used: no problem in the data."
    job = medpfl.Job("small", 2, medpfl.Settings(rounds=1), {}, medpfl.SoftPull(), medpfl.Tabular("blood"))
    result = medpfl.simulate(job, table_sites, tmp_path / "results")
    file = next(result.folder.rglob("anna/**/personal-best.safetensors"))
    assert repr(medpfl.load_model(file)) == f"Model: personal of {file}"


def test_a_result_is_that_of_the_folder_in_which_it_was_made(
    table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After os.chdir it was not found, or was that of the other folder's job of the same name, in silence."""
    results = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        settings = medpfl.Settings(rounds=1, seed=number, references=(), finetune=0)
        job = medpfl.Job("small", 2, settings, {}, medpfl.SoftPull(), medpfl.Tabular("blood"))
        results.append(medpfl.simulate(job, table_sites))
    first, again = results[0], medpfl.load_result("results/small-simulated")
    monkeypatch.chdir(tmp_path / "0")
    assert isinstance(again, medpfl.JobResult)
    assert [one.summary.settings.seed for one in (first, again)] == [0, 1]


def test_a_session_goes_on_with_its_own_threads_and_random_numbers(
    table_sites: dict[str, Path], tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        job = medpfl.Job("small", 2, medpfl.Settings(rounds=1), {}, medpfl.SoftPull(), medpfl.Tabular("blood"))
        medpfl.simulate(job, table_sites, tmp_path / "results")
        assert torch.get_num_threads() == 2 and torch.equal(torch.rand(3), expected)
    finally:
        torch.set_num_threads(threads)


def test_a_class_that_other_processes_cannot_import_is_not_compared() -> None:
    class Mine(medpfl.SoftPull):
        pass

    with pytest.raises(medpfl.MedPFLError, match=r"Mine cannot be compared from where it is defined.*%%writefile"):
        medpfl.compare({"name": "cells", "task": medpfl.Tabular("cells"), "methods": {"Mine": {"path": Mine}}})
    namespace: dict[str, type[medpfl.Tabular]] = {}
    exec("import medpfl\nclass Ours(medpfl.Tabular):\n    __module__ = '__main__'", namespace)
    with pytest.raises(medpfl.MedPFLError, match=r"Ours cannot be compared from where it is defined.*%%writefile"):
        medpfl.compare({"name": "cells", "task": namespace["Ours"]("cells"), "methods": {}})


def test_what_is_no_job_and_no_folder_is_told(tmp_path: Path) -> None:
    """These were errors of Python's, and of a name the first hospital said that the server had sent it."""
    settings, task, method = medpfl.Settings(rounds=1), medpfl.Tabular("cells"), medpfl.SoftPull()
    good = {"name": "a", "min_clients": 2, "settings": settings, "components": {}, "method": method, "task": task}
    for wrong, said in (
        ({"name": "my job"}, "the job's name must be letters, digits, '.', '_' or '-', got 'my job'"),
        ({"method": medpfl.SoftPull}, r"a job's method must be an object, got the class SoftPull: call it, SoftPull"),
        ({"method": "SoftPull"}, "a job's method must be a Method, got 'SoftPull'"),
        ({"task": method}, r"a job's task must be a Task, got SoftPull\("),
        ({"settings": {"rounds": 1}}, "a job's settings must be a Settings, got {'rounds': 1}"),
        ({"components": None}, "a job's components must be a Mapping, got None"),
        ({"components": {"model": method}}, r"component 'model' must be a Mixer, got SoftPull\("),
    ):
        with pytest.raises(medpfl.MedPFLError, match=said):
            medpfl.Job(**{**good, **wrong})  # type: ignore[arg-type]
    with pytest.raises(
        medpfl.MedPFLError, match="expected a job, a job's folder or the name of a shipped job, got Sof"
    ):
        medpfl.simulate(method, tmp_path, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(medpfl.MedPFLError, match="expected a folder with site files, or hospital to site file, got"):
        medpfl.simulate(medpfl.Job(**good), [tmp_path], tmp_path)  # type: ignore[arg-type]
