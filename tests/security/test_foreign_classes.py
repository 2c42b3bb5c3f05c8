# SPDX-License-Identifier: Apache-2.0
"""A job names classes that are not ours: FLARE's own, which read files; attributes of allowed ones; modules that act
when they are imported. FLARE's builder and matcher are the real ones."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.fuel.common.excepts import ComponentNotAuthorized

import medpfl
from flare_builder import FILES, HOSPITAL, SERVER, configured, context
from medpfl.component import build, import_named
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.data.kinds import read_preparation
from medpfl.data.preparation import Spec
from medpfl.flare.allow import allow, component_classes
from medpfl.flare.authorize import check_allowed
from medpfl.flare.doctor import allow_list
from medpfl.flare.kits import Kit
from medpfl.job import load_job, write_job
from medpfl.job.names import EXECUTOR
from medpfl.methods.contract import Method
from small_jobs import small_job

NUMPY = "nvflare.app_common.np"
READERS = {
    HOSPITAL: [
        (f"{NUMPY}.np_model_persistor.NPModelPersistor", {"source_ckpt_file_full_name": "/srv/patients.npy"}),
        (f"{NUMPY}.np_trainer.NPTrainer", {}),
        (f"{NUMPY}.np_validator.NPValidator", {}),
        ("nvflare.app_common.ccwf.CyclicClientController", {}),
        ("nvflare.app_common.ccwf.comps.np_file_model_persistor.NPFileModelPersistor", {}),
    ],
    SERVER: [
        ("nvflare.app_common.workflows.cross_site_model_eval.CrossSiteModelEval", {}),
        (f"{NUMPY}.np_model_persistor.NPModelPersistor", {"source_ckpt_file_full_name": "/srv/patients.npy"}),
    ],
}


@pytest.fixture
def kit(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A kit as FLARE makes it, as far as it decides about classes, after ``medpfl site allow``."""
    name = getattr(request, "param", HOSPITAL)
    folder = tmp_path / name
    (folder / "startup").mkdir(parents=True)
    (folder / "local").mkdir()
    (folder / "startup" / ("fed_server.json" if name == SERVER else "fed_client.json")).write_text("{}")
    files = {"resources": {"class_allow_list": list(DEFAULT_CLASS_ALLOW_LIST)}, "authorization": {"permissions": {}}}
    for file, content in files.items():
        (folder / "local" / f"{file}.json.default").write_text(json.dumps(content))
    allow(folder)
    return folder


def listed(kit: Path) -> list[str]:
    found: list[str] = json.loads((kit / "local" / "resources.json").read_text())["class_allow_list"]
    return found


def attacked(kit: Path, folder: Path, component: dict[str, Any]) -> Path:
    """A job with one more component."""
    write_job(small_job(), folder)
    file = folder / "app" / "config" / FILES[kit.name]
    content = json.loads(file.read_text())
    content["components"].append({"id": "more", **component})
    file.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("kit", "path", "args"), [(name, *one) for name, all_ in READERS.items() for one in all_], indirect=["kit"]
)
def test_a_class_of_flare_that_reads_files_is_not_built(
    kit: Path, tmp_path: Path, path: str, args: dict[str, Any]
) -> None:
    job = attacked(kit, tmp_path / "job", {"path": path, "args": args})
    with pytest.raises(ComponentNotAuthorized, match=f"'{path}'"):
        configured(kit, job)


def test_the_list_is_what_our_jobs_need_and_no_more(kit: Path) -> None:
    assert listed(kit) == component_classes()
    assert all(name.startswith(f"{medpfl.__name__}.") for name in listed(kit))


def test_a_class_is_listed_where_it_is_made_and_where_its_package_offers_it() -> None:
    """Not in every module that has imported it: a name more is a name more that somebody must review."""
    for name in component_classes():
        place, _, attribute = name.rpartition(".")
        module = importlib.import_module(place)
        assert getattr(module, attribute).__module__ == place or hasattr(module, "__path__"), name


def test_a_class_of_flare_is_allowed_by_name_and_forgotten_unless_it_is_named_again(kit: Path) -> None:
    trainer = READERS[HOSPITAL][1][0]
    assert allow(kit, [trainer]).dropped == ()
    assert trainer in listed(kit)
    assert allow(kit).dropped == (trainer,)
    assert listed(kit) == component_classes()


def doctors(kit: Path) -> list[Any]:
    paths = dict.fromkeys(("certificate", "key", "root"), kit)
    return list(allow_list(Kit(kit, "hospital", kit.name, "localhost", 1, "mtls", **paths)))


def test_the_doctor_names_every_further_class(kit: Path) -> None:
    trainer = READERS[HOSPITAL][1][0]
    assert [found.status for found in doctors(kit)] == ["ok"]
    allow(kit, [trainer])
    risk = [found for found in doctors(kit) if trainer in found.text]
    assert [found.status for found in risk] == ["note"] and "risk" in risk[0].text and risk[0].mend
    file = kit / "local" / "resources.json"
    content = json.loads(file.read_text())  # a kit of an older MedPFL, which kept FLARE's whole list
    content["class_allow_list"] = sorted({*listed(kit), *DEFAULT_CLASS_ALLOW_LIST})
    file.write_text(json.dumps(content))
    worst = [found for found in doctors(kit) if found.status == "problem"]
    assert worst and all(name in worst[0].text for name in DEFAULT_CLASS_ALLOW_LIST)


@pytest.mark.parametrize("path", [f"{EXECUTOR}.execute", "medpfl.methods.softpull.SoftPull.local_round"])
def test_an_attribute_of_an_allowed_class_is_no_class(kit: Path, tmp_path: Path, path: str) -> None:
    """FLARE's matcher takes it; nothing can be built of it, and the controller's own check says no."""
    with pytest.raises(Exception, match=r"load class|not in allow_list"):
        configured(kit, attacked(kit, tmp_path / "job", {"path": path}))
    with pytest.raises(ConfigError, match="not in allow_list"):
        check_allowed(path, context(kit))


def test_a_class_that_is_a_modules_name_too_cannot_be_allowed(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE would take the whole module for it: ``shadow.tool.anything``."""
    package = tmp_path / "shadow"
    package.mkdir()
    (package / "tool.py").write_text("import os\nclass tool: pass\n")
    (package / "__init__.py").write_text("from shadow.tool import tool\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MedPFLError, match=r"'shadow\.tool' cannot be allowed: .* module"):
        allow(kit, ["shadow.tool"])


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file behind when it is imported; returns the file."""
    (tmp_path / "trapdoor.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n"
        "from medpfl.methods.fedavg import FedAvg\nclass Trap(FedAvg): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sprung"
    sys.modules.pop("trapdoor", None)


def test_a_module_that_a_job_names_is_not_imported(trap: Path, tmp_path: Path) -> None:
    folder = write_job(small_job(), tmp_path / "job")
    file = folder / "app" / "config" / FILES[HOSPITAL]
    content = json.loads(file.read_text())
    content["executors"][0]["executor"]["args"]["method"]["path"] = "trapdoor.Trap"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="'trapdoor' is not MedPFL's, and MEDPFL_PACKAGES does not name it"):
        load_job(folder)
    assert not trap.exists() and "trapdoor" not in sys.modules


def test_a_module_that_a_models_file_names_is_not_imported(trap: Path) -> None:
    with pytest.raises(ConfigError, match="'trapdoor' is not MedPFL's"):
        build({"path": "trapdoor.Trap"}, Method, "method")
    with pytest.raises(ConfigError, match="'trapdoor' is not MedPFL's"):
        read_preparation({"kind": "trapdoor.Trap"}, Spec("mask", ("volumes",)))
    assert not trap.exists()


def test_medpfls_own_command_does_not_run_because_a_file_names_its_module() -> None:
    """It would take this process's arguments for its own, and end the process."""
    sys.modules.pop("medpfl.__main__", None)
    with pytest.raises(ConfigError, match=r"there is no class 'medpfl\.__main__\.Method'"):
        build({"path": "medpfl.__main__.Method"}, Method, "method")


def test_a_package_that_the_user_names_is_imported(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDPFL_PACKAGES", "another, trapdoor")
    assert type(build({"path": "trapdoor.Trap"}, Method, "method")).__name__ == "Trap"
    assert trap.exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_library_anywhere\n", "No module named 'no_such_library_anywhere'"),
        ("from json import nothing_such\n", r"cannot import name 'nothing_such' from 'json' \(__init__\.py\)"),
        ("class Trap(:\n", r"invalid syntax \(trapdoor\.py, line 1\)"),
    ],
)
def test_a_package_of_the_users_own_that_cannot_be_imported_says_why(
    code: str, said: str, trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site file's or a comparison's said that MEDPFL_PACKAGES did not name it, so that nothing of it was imported,
    and a slip of the pen in it was a traceback. The server is told the sentence, which named a folder of the hospital's
    where Python names it."""
    (trap.parent / "trapdoor.py").write_text(code)
    import_named({"path": "trapdoor.Trap"})
    with pytest.raises(ConfigError, match=f"there is no class 'trapdoor.Trap': {said}"):
        build({"path": "trapdoor.Trap"}, Method, "method")
    monkeypatch.setattr("medpfl.component._failed", {})
    monkeypatch.setenv("MEDPFL_PACKAGES", "trapdoor")
    with pytest.raises(ConfigError, match=f"there is no class 'trapdoor.Trap': {said}"):
        build({"path": "trapdoor.Trap"}, Method, "method")
