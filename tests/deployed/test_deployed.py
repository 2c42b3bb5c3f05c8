# SPDX-License-Identifier: Apache-2.0
"""What a job leaves at a hospital: the model loads for every method, its card is true, a broken file is told of."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torch import Tensor, nn

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Identity, Mean, Mixer, ServerAdam, SoftPull
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import load_site_file
from medpfl.deployed.evaluate import Origin, evaluate, evaluate_test, save_deployed
from medpfl.deployed.model_file import Deployed, load_deployed, read_model
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.methods.contract import Build, Method
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.fedsm import FedSM, SuperModel
from medpfl.methods.ifca import IFCA
from medpfl.methods.moe import MoE
from medpfl.tasks.metrics.calibration import BINS, calibration
from medpfl.tasks.tabular import Tabular
from small_jobs import declared, write_table_sites
from tools import run

REFERENCES: dict[str, Mixer] = {"local": Identity(), "fedavg": Mean()}
METHODS: dict[str, tuple[Method, dict[str, Mixer]]] = {
    "softpull": (softpull.SoftPull(lr=0.05), {**REFERENCES, "model": SoftPull(lam=0.5)}),
    "fedsm": (FedSM(lr=0.05), {"global": Mean(), "personal": SoftPull(lam=0.5), "selector": ServerAdam()}),
}
STEMS = {
    "softpull": ["personal-best", "personal-last", "local-best", "fedavg-last", "fedavg_finetuned-best"],
    "fedsm": ["personal-best", "global-best", "global-last"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any], dict[str, Path]]]:
    """Every method trained on the small tables: its folder, its results and the site files."""
    found = {}
    for name, (method, mixers) in METHODS.items():
        folder = tmp_path_factory.mktemp(name)
        sites = write_table_sites(folder / "sites")
        references, components = declared(mixers, method)
        settings = Settings(rounds=2, references=references, finetune=1)
        job = Job(name, 2, settings, components, method, Tabular(dataset="blood", hidden=(4,)))
        found[name] = folder, run(job, sites, folder), sites
    return found


def model_of(folder: Path, method: str, stem: str, site: str = "berta") -> Path:
    return folder / "home" / site / method / "models" / f"{stem}.safetensors"


@pytest.mark.parametrize(("name", "stem"), [(name, stem) for name, stems in STEMS.items() for stem in stems])
@pytest.mark.slow
def test_every_model_loads_and_gives_the_reported_results(runs: dict[str, Any], name: str, stem: str) -> None:
    folder, result, sites = runs[name]
    before = torch.get_rng_state()
    model = load_deployed(model_of(folder, name, stem))
    assert torch.equal(torch.get_rng_state(), before)
    samples = model.task.load(load_site_file(sites["berta"], "berta")).splits["test"]
    found = evaluate(model.method, model.name, model.networks, model.task, samples, torch.device("cpu"))
    deployed, choice = stem.rsplit("-", 1)
    told = [t for t in result["test"] if (t["site"], t["model"], t["choice"]) == ("berta", deployed, choice)]
    assert found and [found.metrics] == [line["metrics"] for line in told]
    assert (model.class_names, model.input_shape) == (["no", "yes"], (3,))
    outputs = model(samples.inputs)
    assert torch.equal(model.module()(samples.inputs).detach(), outputs) and not outputs.requires_grad
    assert model.meta.parameters == sum(p.numel() for p in model.networks.parameters())


@pytest.mark.parametrize(
    ("method", "name", "kept"),
    [
        (FedSM(), "personal", ["personal"]),
        (FedSM(), "global", ["global"]),
        (MoE(), "personal", ["global", "expert", "gate"]),
        (MoE(), "global", ["global"]),
        (FedRoD(), "personal", ["generic", "head"]),
        (FedRoD(), "generic", ["generic"]),
        (IFCA(clusters=3), "personal", ["cluster2", "choice"]),
        (SuperModel(trained=FedSM(), hospitals=("a", "b"), gamma=0.5), "super", None),
    ],
)
def test_a_file_holds_the_networks_that_predict(
    method: Method, name: str, kept: list[str] | None, tmp_path: Path
) -> None:
    """And gives what all networks give; a super model chooses case by case, so it keeps all."""
    samples = Samples(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]), np.arange(5), list("abcde"), 2)
    data = SiteData(dict.fromkeys(("train", "validation", "test"), samples), ["no", "yes"])
    task = Tabular(dataset="blood", hidden=(4,))
    networks = nn.ModuleDict(method.models(Build(task, data, ("a", "b"), seed=0))).eval()
    for number, weight in enumerate(networks.parameters()):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(number))
    if isinstance(method, IFCA):
        networks["choice"].get_buffer("2").fill_(9)
    origin = Origin("j", "a", name, "last", 1)
    tested = evaluate_test(method, name, networks, task, data, torch.device("cpu"))
    save_deployed(tmp_path, origin, method, name, networks, task, data, 2, tested)
    model = load_deployed(tmp_path / f"{name}-last.safetensors")
    assert list(model.networks) == (list(networks) if kept is None else kept)
    with torch.inference_mode():
        assert torch.equal(model(samples.inputs), method.predict(name, networks, samples.inputs))


@pytest.mark.slow
def test_a_network_that_the_method_does_not_have_is_named(runs: dict[str, Any], tmp_path: Path) -> None:
    tensors, meta = read_model(model_of(runs["fedsm"][0], "fedsm", "personal-best"))
    recipe = meta.recipe.model_copy(update={"networks": ["personal", "twin"]})
    meta.model_copy(update={"recipe": recipe}).write(tmp_path / "m.safetensors", tensors)
    with pytest.raises(MedPFLError, match=r"FedSM has no network 'twin'; it has: global, personal, selector"):
        load_deployed(tmp_path / "m.safetensors")


@pytest.mark.slow
def test_the_card_says_what_is_true(runs: dict[str, Any]) -> None:
    folder, _, sites = runs["softpull"]
    path = model_of(folder, "softpull", "personal-best")
    text, model = path.with_suffix(".md").read_text(), load_deployed(path)
    data = model.task.load(load_site_file(sites["berta"], "berta"))
    for split, samples in data.splits.items():
        no, yes = np.bincount(samples.targets.numpy(), minlength=2)
        assert f"| {split} | {len(samples)} | {no} | {yes} |" in text
    history = model.meta.history
    assert history and history.calibration
    for metric, value in history.test.items():
        assert f"| {metric} | {value:.4f} |" in text
    with open(path.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    # With two classes the cases hold the whole distribution, so both numbers follow from them by hand.
    top = np.array([float(row["probability"]) for row in rows])
    right = np.array([row["class"] == row["predicted"] for row in rows])
    assert history.calibration.brier == pytest.approx(np.mean((1 - np.where(right, top, 1 - top)) ** 2), abs=1e-6)
    assert f"{history.calibration.ece:.4f}" in text and f"{history.calibration.brier:.4f}" in text
    for words in ("Not a medical device", "Intended use", "Limitations", model.meta.sha256, "job softpull"):
        assert words in text
    for verb in ("predict", "evaluate", "export"):
        assert f"medpfl {verb} personal-best.safetensors" in text


def test_calibration_against_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    second = rng.uniform(0.5, 1, 1000)  # the second class is always chosen, so both see the same bins
    truth = (rng.random(1000) < second**2).astype(np.int64)
    found = calibration(truth, np.stack([1 - second, second], axis=1).astype(np.float32))
    right, given = calibration_curve(truth, second, n_bins=BINS)
    share = np.histogram(second, bins=BINS, range=(0, 1))[0]
    assert found and found.ece == pytest.approx(np.abs(right - given) @ share[share > 0] / 1000, abs=1e-6)
    assert found.brier == pytest.approx(np.mean((second - truth) ** 2), abs=1e-6)


@pytest.mark.parametrize(
    ("truth", "probability", "ece", "brier"),
    [
        ([0, 1], [[1, 0], [0, 1]], 0, 0),  # certain and right
        ([0, 1], [[0, 1], [1, 0]], 1, 1),  # certain and wrong
        ([0, 0, 0, 1], [[0.75, 0.25]] * 4, 0, (3 * 0.25**2 + 0.75**2) / 4),  # right as often as it says
        ([0, 0, 0], [[0.6, 0.4]] * 3, 0.4, 0.16),  # one class only is there
        ([0, 1, 2], [[0.5, 0.25, 0.25]] * 3, 0.5 - 1 / 3, (0.375 + 0.875 + 0.875) / 3),
        ([0, 1], [[np.nan, 0.5], [0.5, 0.5]], None, None),
    ],
)
def test_calibration_by_hand(truth: list[int], probability: list[list[float]], ece: Any, brier: Any) -> None:
    found = calibration(np.array(truth), np.array(probability, dtype=np.float32))
    if ece is None:
        assert found is None
    else:
        assert found and (found.ece, found.brier) == pytest.approx((ece, brier), abs=1e-6)


Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def _meta(*keys: str, to: Any) -> Change:
    def change(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        place = meta
        for key in keys[:-1]:
            place = place[key]
        if to is None:
            del place[keys[-1]]
        else:
            place[keys[-1]] = to

    return change


def _tensor(key: str, to: Tensor | None) -> Change:
    def change(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        tensors.pop(key, None)
        tensors.update({} if to is None else {key: to})

    return change


WEIGHT = "model.0.weight"  # [4, 3]
BROKEN: dict[str, tuple[Change, str]] = {
    "a tensor's shape": (
        _tensor(WEIGHT, torch.zeros(5, 3)),
        f"entry '{WEIGHT}': expected shape [4, 3] torch.float32, got [5, 3] torch.float32",
    ),
    "a tensor's type": (_tensor(WEIGHT, torch.zeros(4, 3).half()), "torch.float32, got [4, 3] torch.float16"),
    "a tensor is missing": (_tensor(WEIGHT, None), f"entry '{WEIGHT}' is missing"),
    "a tensor too many": (_tensor("model.9.bias", torch.zeros(1)), "entry 'model.9.bias' is too many"),
    "other values": (_tensor(WEIGHT, torch.zeros(4, 3)), "altered after it was written"),
    "other class names": (_meta("recipe", "classes", to=["yes", "no"]), "altered after it was written"),
    "another result": (_meta("history", "test", "accuracy", to=1.0), "altered after it was written"),
    "another network": (_meta("recipe", "task", "args", "hidden", to=[5]), "expected shape [5"),
    "another input shape": (_meta("recipe", "input_shape", to=[7]), "expected shape [4, 7]"),
    "no input shape": (_meta("recipe", "input_shape", to=[]), "'recipe.input_shape': list should have at least 1"),
    "an empty input": (_meta("recipe", "input_shape", to=[0]), "'recipe.input_shape.0': input should be greater"),
    "one class": (
        _meta("recipe", "classes", to=["no"]),
        "expected no class or at least 2",
    ),
    "no hospitals": (_meta("recipe", "hospitals", to=0), "'recipe.hospitals': input should be greater than 0"),
    "no recipe": (_meta("recipe", to=None), "'recipe': field required"),
    "an unknown key": (_meta("colour", to=1), "'colour': extra inputs are not permitted"),
    "a newer format": (_meta("model_format", to=2), "made by a newer MedPFL (model format 2, this one reads 1)"),
    "a method that is not installed": (
        _meta("recipe", "method", "path", to="hospital.methods.Ours"),
        "method: there is no class 'hospital.methods.Ours'",
    ),
    "a function for a method": (_meta("recipe", "method", "path", to="os.system"), "'os.system' is not a class"),
    "a class that is no method": (_meta("recipe", "method", "path", to="subprocess.Popen"), "is no Method"),
    "a task that is no task": (_meta("recipe", "task", "path", to="medpfl.core.mixers.Mean"), "is no Task"),
    "an argument the method lacks": (_meta("recipe", "method", "args", "lam", to=1), "unknown argument 'lam'"),
    "a model the method lacks": (_meta("recipe", "deployed", to="global"), "SoftPull deploys no model 'global'"),
    "not a model": (_meta("kind", to=None), "not a deployed model but another file of MedPFL's"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_altered_file_is_told_in_one_sentence(runs: dict[str, Any], tmp_path: Path, what: str) -> None:
    tensors, meta = store.read(model_of(runs["softpull"][0], "softpull", "personal-best"))
    change, words = BROKEN[what]
    change(tensors, meta)
    path = tmp_path / "altered.safetensors"
    store.save(path, tensors, meta)
    with pytest.raises(MedPFLError) as caught:
        load_deployed(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and words in text and "\n" not in text


def _cut(source: Path, path: Path) -> None:
    path.write_bytes(source.read_bytes()[:-40])


def _flipped(source: Path, path: Path) -> None:
    content = bytearray(source.read_bytes())
    content[-1] ^= 1  # the last byte of a weight
    path.write_bytes(content)


def _foreign(source: Path, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, path)


def _pickled(source: Path, path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, path)


def _checkpoint(source: Path, path: Path) -> None:
    path.write_bytes(next((source.parents[1] / "state").rglob("private-*.safetensors")).read_bytes())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda source, path: None, "cannot read"),
        (lambda source, path: path.mkdir(), "cannot read"),
        (lambda source, path: path.write_bytes(b""), "cannot read"),
        (lambda source, path: path.write_text("# Model card"), "cannot read"),
        (_cut, "cannot read"),
        (_pickled, "cannot read"),
        (_foreign, "not a file of MedPFL's"),
        (_checkpoint, "not a deployed model but another file of MedPFL's"),
        (_flipped, "its tensors are not those that were written"),
    ],
    ids=["missing", "folder", "empty", "text", "cut", "pickled", "foreign", "checkpoint", "one bit"],
)
def test_a_file_that_is_no_model(
    runs: dict[str, Any], tmp_path: Path, make: Callable[[Path, Path], Any], words: str
) -> None:
    path = tmp_path / "model.safetensors"
    make(model_of(runs["softpull"][0], "softpull", "personal-best"), path)
    with pytest.raises(MedPFLError) as caught:
        load_deployed(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_file_names_no_other_hospital(runs: dict[str, Any]) -> None:
    for name, stems in STEMS.items():
        for stem in stems:
            text = json.dumps(store.read_meta(model_of(runs[name][0], name, stem)))
            assert '"berta"' in text and "anna" not in text and "clara" not in text


def test_a_deployed_model_cannot_be_changed(runs: dict[str, Any]) -> None:
    model = load_deployed(model_of(runs["fedsm"][0], "fedsm", "personal-best"))
    assert isinstance(model, Deployed) and not any(module.training for module in model.networks.modules())
    with pytest.raises(AttributeError):
        model.name = "global"  # type: ignore[misc]
