# SPDX-License-Identifier: Apache-2.0
"""What FLARE's builder makes of a job's files, with a kit's allow list, as in the processes of a job: classes named in
full become components, inside each other too; functions and mistyped arguments are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.common.excepts import ComponentNotAuthorized, ConfigError

from flare_builder import CONFIGURATORS, FILES, HOSPITAL, SERVER, configured
from in_process import Engine
from ledger import Ledger
from medpfl.component import spec_of
from medpfl.core.errors import ConfigError as OurConfigError
from medpfl.flare.allow import allow
from medpfl.flare.controller import MixingController
from medpfl.flare.executor import SiteExecutor
from medpfl.flare.provision import provision
from medpfl.job import Job, load_job, write_job
from medpfl.methods.start import Start
from medpfl.models.resnet import ResNet
from medpfl.tasks.classification import Classification
from small_jobs import small_job

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kits that allow our classes, and one of somebody else's package."""
    made = provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits")).folder
    for name in CONFIGURATORS:
        allow(made / name, ["bounded_fedavg.BoundedFedAvg", "ledger.Ledger"])
    return made


@pytest.fixture
def build(kits: Path, tmp_path: Path) -> Callable[..., Any]:
    """Builds a job in a copy of a kit after a change to one of its files."""

    def do(name: str, job: Job, change: Callable[[Any], object] = lambda content: None) -> Any:
        shutil.copytree(kits / name, tmp_path / "kits" / name)
        write_job(job, tmp_path / "job")
        file = tmp_path / "job" / "app" / "config" / FILES[name]
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return configured(tmp_path / "kits" / name, tmp_path / "job")

    return do


@pytest.mark.parametrize("folder", sorted((ROOT / "jobs").iterdir()), ids=lambda folder: folder.name)
@pytest.mark.slow
def test_shipped_jobs_are_built_as_they_are_loaded(build: Callable[..., Any], folder: Path) -> None:
    job = load_job(folder)
    assert isinstance(job, Job)
    made = build(SERVER, job)
    assert isinstance(made.workflows[0].controller, MixingController)
    assert {slot: made.components[slot] for slot in job.components} == job.components
    executor = build(HOSPITAL, job).task_router.route("train")
    assert isinstance(executor, SiteExecutor)
    for built, loaded in ((executor.method, job.method), (executor.task, job.task)):
        assert json.dumps(spec_of(built)) == json.dumps(spec_of(loaded))


@pytest.mark.slow
def test_a_component_inside_a_component(build: Callable[..., Any]) -> None:
    """Classification names its network by class: FLARE builds it inside the task."""
    task = Classification("skin", size=(16, 16), architecture=ResNet(width=4))
    assert build(HOSPITAL, small_job(task=task)).task_router.route("train").task == task


@pytest.mark.slow
def test_start_weights_inside_a_method(build: Callable[..., Any]) -> None:
    """An optional component of a component, whose arguments are names and lists."""
    job = small_job()
    job = replace(job, method=replace(job.method, start=Start("known", "new", ("0",))))
    assert build(HOSPITAL, job).task_router.route("train").method == job.method


@pytest.mark.parametrize(
    "path",
    [
        "medpfl.flare.allow.allow",  # functions of the package
        "medpfl.bundle.find_bundle",
        "medpfl.flare.pack.shutil.rmtree",  # what a module of the package has imported
        "subprocess.run",
    ],
)
@pytest.mark.parametrize("name", CONFIGURATORS)
def test_a_job_cannot_call_a_function(build: Callable[..., Any], tmp_path: Path, name: str, path: str) -> None:
    victim = tmp_path / "victim"
    (victim / "local").mkdir(parents=True)

    def add(content: Any) -> None:
        content["components"].append({"id": "evil", "path": path, "args": {"kit": str(victim)}})

    with pytest.raises(ComponentNotAuthorized, match=f"'path': '{path}'"):
        build(name, small_job(), add)
    assert not list((victim / "local").iterdir())


def test_a_tracker_of_another_package_is_built_where_the_site_allows_it(
    build: Callable[..., Any], tmp_path: Path
) -> None:
    """FLARE builds the controller; the controller builds the trackers, which FLARE's builder knows nothing of."""
    job = replace(small_job(), trackers=(Ledger(title="ours"),))
    controller = build(SERVER, job).workflows[0].controller
    coordinator = controller._new_coordinator(context(tmp_path / "kits" / SERVER))
    assert coordinator.job.trackers == job.trackers
    coordinator.record.fail("too few hospitals answered")
    assert coordinator.job.trackers[0].failed == "too few hospitals answered"


def test_a_tracker_that_the_site_does_not_allow(build: Callable[..., Any], tmp_path: Path) -> None:
    def name_another(content: Any) -> None:
        content["trackers"] = [{"path": "subprocess.Popen", "args": {"args": ["true"]}}]

    controller = build(SERVER, small_job(), name_another).workflows[0].controller
    with pytest.raises(OurConfigError, match=r"subprocess\.Popen"):
        controller._new_coordinator(context(tmp_path / "kits" / SERVER))


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "..", "", None])
def test_a_job_s_name_is_no_path_at_the_server(build: Callable[..., Any], tmp_path: Path, name: str | None) -> None:
    """FLARE hands on whatever meta.json says, and the server's state lies in a folder of that name."""
    controller = build(SERVER, small_job()).workflows[0].controller
    with pytest.raises(OurConfigError, match=r"'name' must be letters, digits"):
        controller._new_coordinator(context(tmp_path / "kits" / SERVER, name))


def context(kit: Path, name: str | None = "small") -> FLContext:
    """Of the server's process in a job."""
    meta = {"name": name, "min_clients": 2}
    clients = [Client("anna", "token-a"), Client("berta", "token-b")]
    return Engine(SERVER, Workspace(str(kit), site_name="at_kit"), meta, clients).new_context()


def test_a_mistyped_argument_is_named(build: Callable[..., Any]) -> None:
    def mistype(content: Any) -> None:
        content["workflows"][0]["args"]["patiense"] = 3

    with pytest.raises(ConfigError, match="patiense"):
        build(SERVER, small_job(), mistype)
