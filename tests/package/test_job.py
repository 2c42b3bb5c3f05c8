# SPDX-License-Identifier: Apache-2.0
"""Jobs: the shipped ones load; a wrong one gets one sentence, with the place in it."""

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Identity, Mean, Mixer, SoftPull
from medpfl.job import load_job
from medpfl.methods.contract import Method
from medpfl.tasks import Regression, Segmentation, Tabular
from medpfl.tasks.contract import Task

JOBS = Path(__file__).resolve().parents[2] / "jobs"
FILES = {
    "meta": Path("meta.json"),
    "server": Path("app", "config", "config_fed_server.json"),
    "client": Path("app", "config", "config_fed_client.json"),
}
GOOD: dict[str, Any] = {
    name: json.loads((JOBS / "softpull_heart" / path).read_text(encoding="utf-8")) for name, path in FILES.items()
}


def write(folder: Path, job: dict[str, Any]) -> Path:
    for name, path in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(job[name]))
    return folder


@dataclass(frozen=True)
class Drop:
    """Marks a key to be removed."""


DROP = Drop()


def changed(keys: tuple[str | int, ...], to: Any) -> dict[str, Any]:
    job = copy.deepcopy(GOOD)
    place: Any = job
    for key in keys[:-1]:
        place = place[key]
    if to is DROP:
        del place[keys[-1]]
    elif isinstance(place, list) and keys[-1] == len(place):
        place.append(to)
    else:
        place[keys[-1]] = to
    return job


@pytest.mark.parametrize("folder", sorted(JOBS.iterdir()), ids=lambda folder: folder.name)
def test_shipped_jobs_load(folder: Path) -> None:
    job = load_job(folder)
    assert job.name == folder.name
    assert list(job.mixers) == [*job.settings.references, *job.method.components()]
    for slot, component in job.components.items():
        assert component != job.method.components()[slot], f"{slot}: this is the method's own component"
    for component in (*job.mixers.values(), job.method, job.task):
        assert build(spec_of(component), object, "copy") == component


def test_a_job_is_what_its_files_say() -> None:
    job = load_job(JOBS / "softpull_heart")
    assert job.mixers == {"local": Identity(), "fedavg": Mean(), "model": SoftPull(lam=0.5)}
    assert (job.min_clients, job.settings.rounds, job.method.steps, job.task) == (3, 15, 100, Tabular("heart"))


CONTROLLER = ("server", "workflows", 0)
MIXER = ("server", "components", 0)
EXECUTOR = ("client", "executors", 0, "executor")
METHOD = (*EXECUTOR, "args", "method")
TASK = (*EXECUTOR, "args", "task")
SERVER_FILE, CLIENT_FILE = "config_fed_server.json", "config_fed_client.json"

WRONG: list[tuple[tuple[str | int, ...], Any, list[str]]] = [
    # unknown keys, at every level
    (("meta", "colour"), 1, ["meta.json", "unknown key 'colour'", "min_clients"]),
    (("server", "colour"), 1, [SERVER_FILE, "unknown key 'colour'", "workflows"]),
    (("server", "server", "colour"), 1, [f"{SERVER_FILE}: server", "unknown key 'colour'"]),
    ((*CONTROLLER, "colour"), 1, [f"{SERVER_FILE}: workflows[0]", "unknown key 'colour'"]),
    ((*MIXER, "colour"), 1, [SERVER_FILE, "'model'", "unknown key 'colour'"]),
    (("client", "colour"), 1, [CLIENT_FILE, "unknown key 'colour'"]),
    (("client", "executors", 0, "colour"), 1, [f"{CLIENT_FILE}: executors[0]", "unknown key 'colour'"]),
    ((*EXECUTOR, "colour"), 1, [f"{CLIENT_FILE}: executor", "unknown key 'colour'"]),
    ((*EXECUTOR, "args", "colour"), 1, [f"{CLIENT_FILE}: executor.args", "unknown key 'colour'"]),
    ((*METHOD, "colour"), 1, [f"{CLIENT_FILE}: method", "unknown key 'colour'"]),
    ((*TASK, "colour"), 1, [f"{CLIENT_FILE}: task", "unknown key 'colour'"]),
    # arguments
    ((*CONTROLLER, "args", "rounds"), "15", [SERVER_FILE, "'rounds' of Settings", "a whole number", "got '15'"]),
    ((*CONTROLLER, "args", "rounds"), 1.5, ["'rounds' of Settings", "a whole number", "got 1.5"]),
    ((*CONTROLLER, "args", "rounds"), True, ["'rounds' of Settings", "a whole number", "got True"]),
    ((*CONTROLLER, "args", "seed"), 2**63, ["the controller's seed must be smaller than 2^63", f"got {2**63}"]),
    ((*CONTROLLER, "args", "train_timeout"), 1e300, ["the controller's train_timeout must be", "at most a year"]),
    ((*CONTROLLER, "args", "grace"), 1e300, ["the controller's grace must be", "at most a year"]),
    ((*CONTROLLER, "args", "rounds"), 0, ["rounds must be at least 1", "got 0"]),
    ((*CONTROLLER, "args", "rounds"), DROP, ["argument 'rounds' of Settings is missing"]),
    ((*CONTROLLER, "args", "round"), 1, ["unknown argument 'round' of Settings", "rounds"]),
    ((*CONTROLLER, "args", "references"), "local", ["'references' of Settings", "a list of strings", "got 'local'"]),
    ((*CONTROLLER, "args", "references"), ["local", "local"], ["name one twice"]),
    ((*CONTROLLER, "args", "references"), ["ditto"], [SERVER_FILE, "no reference 'ditto'", "local, fedavg"]),
    ((*CONTROLLER, "args", "slots"), ["local", "model"], ["no argument 'slots' any more: remove it", "'references'"]),
    ((*CONTROLLER, "args"), [], ["'args' must be a mapping", "got []"]),
    ((*MIXER, "args", "lam"), "0.5", ["component 'model'", "'lam' of SoftPull", "must be a number", "got '0.5'"]),
    ((*MIXER, "args", "lam"), 1.5, ["SoftPull's lam must be in", "1.5"]),
    ((*MIXER, "args", "lambda"), 0.5, ["unknown argument 'lambda' of SoftPull; it has: lam"]),
    ((*METHOD, "args", "lr"), "0.1", [f"{CLIENT_FILE}: method", "'lr' of SoftPull", "must be a number", "got '0.1'"]),
    ((*METHOD, "args", "optimizer"), "lamb", ["'optimizer' of SoftPull", "'adam' or 'sgd'", "got 'lamb'"]),
    ((*METHOD, "args", "epoch"), 1, ["unknown argument 'epoch' of SoftPull", "epochs"]),
    ((*METHOD, "args", "batch_size"), 0, ["batch_size must be at least 1", "got 0"]),
    ((*TASK, "args", "dataset"), DROP, [f"{CLIENT_FILE}: task", "argument 'dataset' of Tabular is missing"]),
    ((*TASK, "args", "dataset"), 5, ["'dataset' of Tabular", "must be a string", "got 5"]),
    ((*TASK, "args", "hidden"), ["8"], ["'hidden' of Tabular", "a list of whole numbers"]),
    ((*TASK, "args", "hidden"), [0], ["Tabular's hidden widths must be at least 1"]),
    # classes
    ((*MIXER, "path"), "medpfl.core.mixers.Mode", ["component 'model'", "no class 'medpfl.core.mixers.Mode'"]),
    ((*MIXER, "path"), "medpfl.nowhere.Mean", ["there is no class 'medpfl.nowhere.Mean'"]),
    ((*MIXER, "path"), "Mean", ["full class name", "got 'Mean'"]),
    ((*MIXER, "path"), "..mixers.Mean", ["there is no class '..mixers.Mean'"]),
    ((*MIXER, "path"), ".Mean", ["there is no class '.Mean'"]),
    ((*MIXER, "path"), 5, ["full class name", "got 5"]),
    ((*MIXER, "path"), DROP, ["component 'model'", "expected {'path'"]),
    ((*MIXER, "path"), "subprocess.run", ["'subprocess.run' is not a class"]),
    ((*MIXER, "path"), "subprocess.Popen", ["'subprocess.Popen' is no Mixer"]),
    ((*MIXER, "path"), "medpfl.tasks.Tabular", ["'medpfl.tasks.Tabular' is no Mixer"]),
    ((*MIXER, "path"), "medpfl.core.mixers.Mixer", ["'medpfl.core.mixers.Mixer' is abstract"]),
    ((*METHOD, "path"), "medpfl.core.mixers.SoftPull", ["method", "is no Method"]),
    ((*METHOD, "path"), "os.system", ["'os.system' is not a class"]),
    ((*METHOD, "path"), "medpfl.methods.fedsm_extra.FedSMExtra", ["is called 'medpfl.methods.fedsm.FedSMExtra' now"]),
    ((*METHOD, "path"), "medpfl.methods.super_model.SuperModel", ["is called 'medpfl.methods.fedsm.SuperModel' now"]),
    ((*TASK, "path"), "medpfl.methods.softpull.SoftPull", ["task", "is no Task"]),
    (METHOD, "softpull", ["method", "expected {'path'", "got 'softpull'"]),
    ((*EXECUTOR, "path"), "subprocess.Popen", ["executor's path must be medpfl", "got 'subprocess.Popen'"]),
    ((*CONTROLLER, "path"), "os.system", ["workflows[0].path must be medpfl", "got 'os.system'"]),
    # slots and components
    ((*MIXER, "id"), "other", [SERVER_FILE, "component 'other': SoftPull has no such slot", "local, fedavg, model"]),
    ((*MIXER, "id"), "local", ["component 'local': remove it; this slot stays at the hospitals"]),
    (("server", "components", 1), GOOD["server"]["components"][0], ["two components have the id 'model'"]),
    ((*MIXER, "id"), DROP, ["a component needs an 'id'"]),
    (("server", "components"), 5, ["'components' must be a list", "got 5"]),
    (("client", "components"), [{"id": "x", "path": "os.system"}], [CLIENT_FILE, "'components' must be empty"]),
    ((*EXECUTOR, "args", "method"), DROP, ["executor's argument 'method' is missing"]),
    ((*EXECUTOR, "args", "task"), DROP, ["executor's argument 'task' is missing"]),
    # trackers
    (("server", "trackers"), 5, ["'trackers' must be a list", "got 5"]),
    (("server", "trackers"), ["ledger"], [f"{SERVER_FILE}: trackers[0]: expected {{'path'", "got 'ledger'"]),
    (("server", "trackers"), [{"path": "medpfl.core.mixers.Mean"}], ["'medpfl.core.mixers.Mean' is no Callback"]),
    (
        ("server", "trackers"),
        [{"path": "medpfl.results.callbacks.Callback"}],
        ["must be a dataclass; Callback is none"],
    ),
    (
        ("server", "trackers"),
        [{"path": "medpfl.results.callbacks.ResultFiles", "args": {"folder": "here"}}],
        [f"{SERVER_FILE}: trackers[0]: argument 'folder' of ResultFiles must be a Path, got 'here'"],
    ),
    # paths, addresses and variables, in any string
    ((*TASK, "args", "dataset"), "/etc/passwd", [CLIENT_FILE, "never a path, URL or variable", "'/etc/passwd'"]),
    # FLARE writes the hospital's folder there, and so the hospital does not take the job
    ((*TASK, "args", "dataset"), "{WORKSPACE}", [CLIENT_FILE, "never a path, URL or variable", "'{WORKSPACE}'"]),
    ((*TASK, "args", "dataset"), "..\\x", ["never a path", "dataset"]),
    ((*TASK, "args", "dataset"), "~root", ["never a path", "'~root'"]),
    ((*TASK, "args", "dataset"), "https://a.example", ["never a path, URL"]),
    ((*TASK, "args", "dataset"), "{$HOME}", ["variable", "'{$HOME}'"]),
    ((*TASK, "args", "a/b"), 1, ["never a path", "'a/b'"]),
    *(
        ((*TASK, "args", "unit"), path, ["unit: a job may name", "never a path"])
        for path in ("/etc/passwd", "../x", "~root/x", "a\\b", "https://a", "{$HOME}/x", "a/b/c/d/e/f/g/h/i/j/k")
    ),
    ((*CONTROLLER, "args", "references"), ["local", "a/b"], [SERVER_FILE, "never a path", "'a/b'"]),
    (("meta", "scope"), "../x", ["meta.json", "scope", "never a path"]),
    (("meta", "launcher_spec"), ["docker"], ["meta.json: launcher_spec: expected a JSON object, site or 'default'"]),
    (("meta", "launcher_spec"), {"a": {"dokcer": {}}}, ["launcher_spec: a: unknown key 'dokcer'", "mean 'docker'"]),
    (("meta", "launcher_spec"), {"a": {"slurm": 1}}, ["launcher_spec: a: slurm: expected a JSON object, got 1"]),
    (
        ("meta", "launcher_spec"),
        {"a": {"docker": {"volumes": "/"}}},
        ["launcher_spec: a: docker: unknown key 'volumes'"],
    ),
    # meta.json and the shape of the files
    (("meta", "name"), "a b", ["'name' must be letters", "got 'a b'"]),
    (("meta", "name"), DROP, ["'name' must be letters", "got None"]),
    (("meta", "min_clients"), 0, ["'min_clients' must be a whole number above 0", "got 0"]),
    (("meta", "min_clients"), "3", ["'min_clients'", "got '3'"]),
    (("meta", "min_clients"), True, ["'min_clients'", "got True"]),
    (("meta", "min_clients"), DROP, ["'min_clients' is missing"]),
    (("meta", "deploy_map"), {}, ["'deploy_map' is missing or empty"]),
    (("meta", "deploy_map"), ["app"], ["'deploy_map' is missing or empty"]),
    (("meta", "deploy_map"), {"application": ["@ALL"]}, ["'deploy_map' must name the folder 'app'", "got application"]),
    (("meta", "deploy_map", "app"), [], ["'deploy_map': 'app' must list sites, as [\"@ALL\"]", "got []"]),
    (("meta", "deploy_map", "app"), None, ["'app' must list sites", "got None"]),
    (("meta", "deploy_map", "app"), ["server", 3], ["'app' must list sites", "got ['server', 3]"]),
    (("meta", "deploy_map", "app"), {"site": ["@ALL"]}, ["'app' must list sites", "got {'site': ['@ALL']}"]),
    (("meta", "deploy_map", "other"), 1, ["'other' must list sites", "got 1"]),
    (("meta", "deploy_map", "app"), ["@ALL", "a"], ["'@ALL' stands for every site", "got ['@ALL', 'a']"]),
    (("meta", "deploy_map", "app"), ["a", "b", "c"], ["the site 'server' is missing", "got ['a', 'b', 'c']"]),
    (("meta", "deploy_map", "app"), ["server", "a", "a", "b"], ["'a' is named twice"]),
    (("meta", "deploy_map"), {"app": ["server", "a", "b"], "other": ["b"]}, ["'b' is named twice; a site gets one"]),
    (("meta", "deploy_map", "app"), ["server", "a", "b"], ["names 2 hospitals, and 'min_clients' is 3"]),
    (
        ("meta",),
        {**GOOD["meta"], "deploy_map": {"app": ["server", "a", "b", "c"]}, "mandatory_clients": ["d"]},
        ["'deploy_map' does not name 'd'", "'mandatory_clients'"],
    ),
    (("meta", "resource_spec"), {"a": 1}, ["'resource_spec' must be a JSON object, site to its own object"]),
    (("server", "format_version"), DROP, [SERVER_FILE, "'format_version' must be 2", "got none"]),
    (("client", "format_version"), "2", [CLIENT_FILE, "'format_version' must be 2", "got '2'"]),
    (("client", "format_version"), 2.0, [CLIENT_FILE, "'format_version' must be 2", "got 2.0"]),
    ((*CONTROLLER, "id"), 3, [f"{SERVER_FILE}: workflows[0].id must be a text", "got 3"]),
    (("meta", "mandatory_clients"), "hospital-a", ["'mandatory_clients' must be a list", "got 'hospital-a'"]),
    (("meta", "resource_spec"), 3, ["'resource_spec' must be a JSON object", "got 3"]),
    (("server", "server", "heart_beat_timeout"), 0, ["heart_beat_timeout must be above 0 seconds", "got 0"]),
    (("server", "server", "heart_beat_timeout"), "x", ["heart_beat_timeout", "got 'x'"]),
    (("server", "server"), DROP, ["task_request_interval must be above 0", "got None"]),
    (("server", "server"), 5, [f"{SERVER_FILE}: server", "expected a JSON object", "got 5"]),
    (("server", "server", "task_request_interval"), DROP, ["task_request_interval", "got None"]),
    (("server", "server", "task_request_interval"), "0.1", ["task_request_interval", "got '0.1'"]),
    (("server", "server", "task_request_interval"), True, ["task_request_interval", "got True"]),
    (("server", "server", "task_request_interval"), 0, ["task_request_interval", "got 0"]),
    (("server", "workflows", 1), GOOD["server"]["workflows"][0], ["'workflows' must hold one entry"]),
    (("server", "workflows"), [], ["'workflows' must hold one entry"]),
    (("server", "workflows"), ["x"], ["workflows[0]", "expected a JSON object", "got 'x'"]),
    (("client", "executors", 1), GOOD["client"]["executors"][0], ["'executors' must hold one entry"]),
    (("client", "executors"), [5], ["executors[0]", "expected a JSON object", "got 5"]),
    (("client", "executors", 0, "executor"), 5, ["executor", "expected a JSON object", "got 5"]),
    (("client", "executors", 0, "executor"), DROP, ["executor", "expected a JSON object", "got None"]),
    (("client", "executors", 0, "tasks"), ["train"], ["tasks must be", "got ['train']"]),
]


@pytest.mark.parametrize(("keys", "to", "words"), WRONG)
def test_one_sentence_names_the_place(tmp_path: Path, keys: tuple[str | int, ...], to: Any, words: list[str]) -> None:
    folder = write(tmp_path, changed(keys, to))
    with pytest.raises(ConfigError) as caught:
        load_job(folder)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.public == str(caught.value)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "a",}', ["not valid JSON", "line 1"]),
        ('{"name": NaN}', ["not valid JSON", "NaN is not a JSON number"]),
        ('{"name": [-1e999]}', ["not valid JSON", "-1e999 is larger than any number here"]),
        ('{"name": 1, "name": 2}', ["not valid JSON", "'name' is there twice"]),
        ("[]", ["expected a JSON object, got list"]),
        ("[" * 100_000, ["not valid JSON"]),
        (None, ["cannot read", "No such file"]),
    ],
)
def test_files_that_are_no_json(tmp_path: Path, file: str, text: str | None, words: list[str]) -> None:
    path = write(tmp_path, GOOD) / FILES[file]
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(tmp_path)
    for word in [path.name, *words]:
        assert word in str(caught.value)


def test_what_flares_launchers_are_told_is_accepted_here_and_by_flare(tmp_path: Path) -> None:
    told = {
        "default": {"docker": {"image": "images.example.org/medpfl-site:0.1", "shm_size": "2g"}},
        "a": {"slurm": {}},
    }
    folder = write(tmp_path / "softpull_heart", changed(("meta", "launcher_spec"), told))
    assert load_job(folder) == load_job(JOBS / "softpull_heart")
    valid, error, meta = JobMetaValidator().validate(folder.name, zip_directory_to_bytes(str(tmp_path), folder.name))
    assert valid and meta["launcher_spec"] == told, error


DEPLOYED: list[Any] = [
    "@ALL", ["@all"], ["server", "a", "b", "c"], {"targets": ["server", "a", "b", "c"]}, {"sites": ["@ALL"]},
    [{"sites": ["server", "a"]}, {"targets": ["b"]}, "c"], [], None, 3, "a", ["a", "b", "c"], ["@ALL", "a"],
    ["server", "a", "a", "b"], ["server", "a", "b"], [["@ALL"]], [{}], {}, ["server", None], {"a": 1}, [""],
]  # fmt: skip


@pytest.mark.parametrize("given", DEPLOYED)
def test_where_a_job_goes_is_accepted_as_by_flare(tmp_path: Path, given: Any) -> None:
    folder = write(tmp_path / "softpull_heart", changed(("meta", "deploy_map", "app"), given))
    valid, error, _ = JobMetaValidator().validate(folder.name, zip_directory_to_bytes(str(tmp_path), folder.name))
    try:
        load_job(folder)
    except ConfigError as refused:
        assert not valid, refused
    else:
        assert valid, error


@pytest.mark.parametrize("unit", ["mmol/L", "mL/min/1.73 m²", "1/min", "%", "days"])
def test_a_unit_may_have_a_slash(tmp_path: Path, unit: str) -> None:
    """Most units of a laboratory have one; it is no path."""
    regression = {"path": "medpfl.tasks.regression.Regression", "args": {"dataset": "blood", "unit": unit}}
    task = load_job(write(tmp_path / "job", changed(TASK, regression))).task
    assert isinstance(task, Regression) and task.measure.unit == unit


def test_links_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(JOBS / "softpull_heart", folder)
    load_job(folder)
    (folder / "app" / "more.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"more\.json is a symbolic link"):
        load_job(folder)


def test_a_wrong_class_is_never_called(tmp_path: Path) -> None:
    """What a job names is checked before it is built, so its arguments cannot make anything happen."""
    marker = tmp_path / "marker"
    for path in ("subprocess.run", "subprocess.Popen", "os.system"):
        with pytest.raises(ConfigError, match=r"is (not a class|no Mixer)"):
            build({"path": path, "args": {"args": ["touch", str(marker)]}}, Mixer, "here")
    assert not marker.exists()


def test_components_inside_components_are_checked_too() -> None:
    for base, path in ((Method, "medpfl.methods.softpull.SoftPull"), (Task, "medpfl.tasks.Tabular")):
        with pytest.raises(ConfigError, match="here"):
            build({"path": path, "args": {"nothing": {"path": "os.system"}}}, base, "here")


def test_whole_numbers_and_lists_pass_for_numbers_and_tuples() -> None:
    task = build(
        {"path": "medpfl.tasks.Segmentation", "args": {"dataset": "organ", "spacing": [1, 2, 3], "size": [32, 32]}},
        Task,
        "here",
    )
    assert task == Segmentation("organ", spacing=(1.0, 2.0, 3.0), size=(32, 32))
