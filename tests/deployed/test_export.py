# SPDX-License-Identifier: Apache-2.0
"""Exported models, read by the software they are for: torch without MedPFL, ONNX Runtime, MONAI's bundle tools."""

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mean, Mixer, ServerAdam, SoftPull
from medpfl.demo.phantom import write_phantoms
from medpfl.deployed.export import METADATA, export
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.monai_bundle import IGNITE
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.methods.contract import Build, Method
from medpfl.methods.fedsm import FedSM
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from monai_command import run_bundle, run_code
from small_jobs import write_table_sites
from tools import run

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = """
from monai.bundle import ConfigWorkflow

workflow = ConfigWorkflow(
    config_file="configs/inference.json",
    meta_file="configs/metadata.json",
    logging_file=False,
    workflow_type="infer",
    bundle_root=".",
)
workflow.initialize()
print("missing:", workflow.check_properties())
"""
SOFT: dict[str, Mixer] = {"model": SoftPull(lam=0.5)}


@dataclass(frozen=True, kw_only=True)
class Chooser(softpull.SoftPull):
    """Predicts by a rule that looks at the inputs' values, which tracing cannot follow."""

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        outputs = super().predict(name, models, inputs)
        return outputs if float(inputs.sum()) > 0 else outputs + 1


@dataclass(frozen=True, kw_only=True)
class Counter(softpull.SoftPull):
    """Predicts by the number of inputs, which tracing takes for a constant."""

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        outputs = super().predict(name, models, inputs)
        return torch.cat([torch.zeros(1, 1).expand(len(inputs), -1), outputs], dim=1)[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Named(softpull.SoftPull):
    """A layer's name is not in ASCII."""

    def models(self, build: Build) -> dict[str, nn.Module]:
        found = super().models(build)
        return {name: nn.Sequential(OrderedDict({"\u5934": network})) for name, network in found.items()}


class Recurrent(nn.Module):
    """An LSTM over a row's values, whose first state is of ``count`` of its inputs."""

    def __init__(self, count: Callable[[Tensor], int]):
        super().__init__()
        self.recurrent, self.last, self._count = nn.LSTM(1, 4), nn.Linear(4, 1), count

    def forward(self, inputs: Tensor) -> Tensor:
        first = torch.zeros(1, self._count(inputs), 4)
        found: Tensor = self.last(self.recurrent(inputs.t()[..., None], (first, first))[0][-1])
        return found


@dataclass(frozen=True, kw_only=True)
class Sequential(softpull.SoftPull):
    """Has a recurrent network; ``by``: where it takes the number of its inputs from."""

    by: str = "len"

    def models(self, build: Build) -> dict[str, nn.Module]:
        count = (lambda inputs: inputs.shape[0]) if self.by == "shape" else len
        return {name: Recurrent(count) for name in super().models(build)}


def trained(folder: Path, method: Method, mixers: dict[str, Mixer], hidden: tuple[int, ...] = (4,)) -> Path:
    sites = write_table_sites(folder / "sites", ["anna", "berta"])
    run(Job("t", 2, Settings(rounds=1, references=()), mixers, method, Tabular("blood", hidden)), sites, folder)
    return folder / "home" / "berta" / "t" / "models" / "personal-best.safetensors"


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms")
    write_phantoms(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, phantoms: Path) -> dict[str, Path]:
    """Small models of every kind, trained for a moment."""
    folder = tmp_path_factory.mktemp("models")
    sites = {site: phantoms / f"{site}.yaml" for site in ("hospital-c", "hospital-d")}
    task = Segmentation(
        dataset="organ", size=(32, 24), spacing=(6.0, 6.0, 12.0), architecture=UNet((4, 8), residual_units=1)
    )
    mixers = {"model": SoftPull(lam=0.5)}
    run(Job("t", 2, Settings(rounds=1, references=()), mixers, softpull.SoftPull(steps=4), task), sites, folder / "s")
    fedsm: dict[str, Mixer] = {"global": Mean(), "personal": SoftPull(lam=0.5), "selector": ServerAdam()}
    return {
        "segmentation": folder / "s" / "home" / "hospital-d" / "t" / "models" / "personal-best.safetensors",
        "table": trained(folder / "t", softpull.SoftPull(), SOFT),
        "logistic": trained(folder / "l", softpull.SoftPull(), SOFT, ()),
        "fedsm": trained(folder / "f", FedSM(), fedsm),
        "chooser": trained(folder / "c", Chooser(), SOFT),
    }


KINDS = ["segmentation", "table", "logistic", "fedsm"]
READ = """
import json, sys, torch
told = []
for folder in sys.argv[1:]:
    extra = {"medpfl.json": ""}
    model = torch.jit.load(f"{folder}/out/model.ts", _extra_files=extra)
    inputs = torch.load(f"{folder}/in.pt", weights_only=True)
    torch.save([model(batch) for batch in inputs], f"{folder}/out.pt")
    told.append(json.loads(extra["medpfl.json"].decode()))
assert not [name for name in sys.modules if name.startswith(("medpfl", "monai"))]
print(json.dumps(told))
"""


@pytest.mark.slow
def test_an_exported_network_asks_for_no_gradients(models: dict[str, Path], tmp_path: Path) -> None:
    """Else its outputs are no numpy arrays, and whoever keeps those of many cases keeps all that led to them."""
    export(models["table"], tmp_path / "out", "torchscript")
    found = torch.jit.load(str(tmp_path / "out" / "model.ts"))  # type: ignore[no-untyped-call]
    assert (
        list(found.parameters())
        and not found(torch.zeros(2, *load_deployed(models["table"]).input_shape)).requires_grad
    )


@pytest.mark.slow
def test_torchscript_runs_without_this_package(models: dict[str, Path], tmp_path: Path) -> None:
    """Each kind of model, all of them in one process, which imports PyTorch once."""
    for kind in KINDS:
        export(models[kind], tmp_path / kind / "out", "torchscript")
        shape = load_deployed(models[kind]).input_shape
        torch.save([torch.randn(size, *shape) for size in (1, 5)], tmp_path / kind / "in.pt")
    command = [sys.executable, "-c", READ, *(str(tmp_path / kind) for kind in KINDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind, told in zip(KINDS, json.loads(done.stdout), strict=True):
        model, folder = load_deployed(models[kind]), tmp_path / kind
        batches = torch.load(folder / "in.pt", weights_only=True)
        for batch, found in zip(batches, torch.load(folder / "out.pt", weights_only=True), strict=True):
            torch.testing.assert_close(found, model(batch), rtol=1e-5, atol=1e-5)
        assert told["classes"] == model.class_names and told["sha256"] == model.meta.sha256
        assert told["input"]["shape"] == ["batch", *model.input_shape]
        assert told["output"]["shape"][1:] == list(model(batches[0]).shape[1:])
        assert ("sigmoid" in told["output"]["probabilities"]) == (kind != "segmentation")
        assert "not be used for decisions" in told["intended_use"]
        assert "Model card" in (folder / "out" / "README.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_onnx_runtime_gives_the_same(models: dict[str, Path], tmp_path: Path, kind: str) -> None:
    import onnxruntime

    model = load_deployed(models[kind])
    export(models[kind], tmp_path / "out", "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    for size in (1, 5, 17):
        batch = torch.randn(size, *model.input_shape)
        (found,) = session.run(["output"], {"input": batch.numpy()})
        np.testing.assert_allclose(found, model(batch).numpy(), rtol=1e-5, atol=1e-5)
    told = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
    assert told["classes"] == model.class_names and told["input"]["shape"] == ["batch", *model.input_shape]


@pytest.fixture(scope="module")
def bundle(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(models["segmentation"], tmp_path_factory.mktemp("monai") / "organ", "monai")


def write_oblique(phantoms: Path, folder: Path) -> Path:
    """A scan with permuted and flipped axes, uneven voxels and a gantry tilted by 10 degrees."""
    source = nib.load(phantoms / "hospital-d" / "images" / "hospital-d_test00.nii.gz")
    assert nib.aff2axcodes(source.affine) == ("P", "I", "R")
    tilt, affine = np.eye(4), np.array(source.affine)
    angle = np.deg2rad(10)
    tilt[1:3, 1:3] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    folder.mkdir()
    image = nib.Nifti1Image(np.asarray(source.dataobj)[:50, :, 3:], tilt @ affine @ np.diag([0.9, 1.0, 1.2, 1.0]))
    nib.save(image, folder / "scan.nii.gz")
    return folder / "scan.nii.gz"


@pytest.mark.slow
def test_monai_runs_the_bundle_on_an_oblique_scan(
    models: dict[str, Path], bundle: Path, phantoms: Path, tmp_path: Path
) -> None:
    scan = write_oblique(phantoms, tmp_path / "in")
    folders = ["--dataset_dir", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")]
    command = ["run", "--config_file", "configs/inference.json", *folders]
    run_bundle(command, bundle)
    written = nib.load(tmp_path / "out" / "scan_seg.nii.gz")
    original = nib.load(scan)
    assert written.shape == original.shape and written.get_data_dtype() == np.uint8
    np.testing.assert_allclose(written.affine, original.affine, atol=1e-4)
    predict(load_deployed(models["segmentation"]), scan, tmp_path / "ours")
    expected = np.asarray(nib.load(next((tmp_path / "ours").glob("*.nii.gz"))).dataobj)
    found = np.asarray(written.dataobj)
    assert 0.01 < expected.mean() < 0.99  # both classes are there
    assert np.array_equal(found, expected)


@pytest.mark.slow
def test_monai_writes_nothing_of_a_volume_with_nan(bundle: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(20, 20, 5)).astype(np.float32)
    values[3, 3, 3] = np.nan
    (tmp_path / "in").mkdir()
    nib.save(nib.Nifti1Image(values, np.diag([4.0, 4.0, 8.0, 1.0])), tmp_path / "in" / "scan.nii.gz")
    folders = ["--dataset_dir", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(AssertionError, match=r"the outputs are not numbers \(NaN or infinite\)"):
        run_bundle(["run", "--config_file", "configs/inference.json", *folders], bundle)
    assert not list((tmp_path / "out").glob("*.nii.gz"))  # it was a mask without the organ


@pytest.mark.slow
def test_monais_own_checks_pass(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from monai.bundle import scripts  # what the command line calls

    monkeypatch.chdir(bundle)
    monkeypatch.setattr(scripts.logger, "propagate", True)
    scripts.verify_net_in_out("network_def", "configs/metadata.json", "configs/inference.json")
    assert "verified with no error" in caplog.text
    # What MONAI's schema of 25 July 2024 requires (it is on the web only), with the types that it gives.
    described = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert described["schema"].endswith("/meta_schema_20240725.json")
    texts = ["version", "monai_version", "pytorch_version", "numpy_version", "task", "description", "authors"]
    for key in [*texts, "copyright", "intended_use", "data_type", "pred_classes"]:
        assert isinstance(described[key], str), key
    for key in ("changelog", "required_packages_version", "eval_metrics"):
        assert isinstance(described[key], dict), key
    kinds = {"type": str, "format": str, "num_channels": int, "spatial_shape": list, "dtype": str, "value_range": list}
    for place, name in (("inputs", "image"), ("outputs", "pred")):
        tensor = described["network_data_format"][place][name]
        assert all(isinstance(tensor[key], kind) for key, kind in kinds.items())


@pytest.mark.slow
def test_monai_loads_the_bundle(models: dict[str, Path], bundle: Path) -> None:
    import monai.bundle

    network, described, _ = monai.bundle.load(bundle.name, bundle_dir=str(bundle.parent), load_ts_module=True)
    model = load_deployed(models["segmentation"])
    inputs = torch.randn(3, *model.input_shape)
    torch.testing.assert_close(network(inputs), model(inputs), rtol=1e-5, atol=1e-5)
    assert described["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": "background", "1": "organ"}
    assert run_code(WORKFLOW, bundle).endswith("missing: []\n")
    assert f"pytorch-ignite=={IGNITE}" in (ROOT / "tests" / "run").read_text()


@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        ("table", "monai", "for models that segment volumes, or whole images; this one's task is Tabular"),
        ("table", "pickle", "--format must be torchscript, onnx, monai; got 'pickle'"),
        ("chooser", "torchscript", "cannot be exported so: model 'personal' of Chooser: with "),
        ("chooser", "onnx", "cannot be exported to ONNX: model 'personal' of Chooser: "),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_exported(models: dict[str, Path], tmp_path: Path, kind: str, form: str, words: str) -> None:
    with pytest.raises(MedPFLError) as caught:
        export(models[kind], tmp_path / "out", form)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_was_traced_does_not_decide_what_is_found(models: dict[str, Path], tmp_path: Path) -> None:
    for seed in range(8):  # whatever random numbers were drawn before
        torch.manual_seed(seed)
        with pytest.raises(MedPFLError, match="gives other outputs than the model"):
            export(models["chooser"], tmp_path / "out", "torchscript")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Counter(), "exported so: model 'personal' of Counter: with 1 inputs the exported network ends with an error"),
        (Named(), "exported to TorchScript: model 'personal' of Named: "),
        (Sequential(), "exported to TorchScript: .* its recurrent layers are written down for 2 inputs alone"),
    ],
    ids=["Counter", "Named", "Sequential"],
)
def test_what_torchscript_cannot_hold_is_told(tmp_path: Path, method: Method, words: str) -> None:
    """A transformer's class token, say, of as many rows as ``len`` says. A recurrent layer's first state of so many
    ended the process, for torch read beyond it."""
    model = trained(tmp_path, method, SOFT)
    with pytest.raises(MedPFLError, match=f"this model cannot be {words}"):
        export(model, tmp_path / "out", "torchscript")
    assert not (tmp_path / "out").exists()


def test_a_recurrent_network_that_goes_by_the_shape_is_exported(tmp_path: Path) -> None:
    export(trained(tmp_path, Sequential(by="shape"), SOFT), tmp_path / "out", "torchscript")


@pytest.mark.slow
def test_an_existing_folder_and_a_missing_package_are_told(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(models["table"], tmp_path / "out", "torchscript")
    with pytest.raises(MedPFLError, match="out exists already"):
        export(models["table"], tmp_path / "out", "torchscript")
    (tmp_path / "file").write_text("")
    with pytest.raises(MedPFLError, match="cannot write"):
        export(models["table"], tmp_path / "file" / "x", "torchscript")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MedPFLError, match=r"needs onnxscript, .* pip install 'medpfl\[export\]'"):
        export(models["table"], tmp_path / "other", "onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "file"}


def test_a_model_without_its_history_exports_too(models: dict[str, Path], tmp_path: Path) -> None:
    model = load_deployed(models["table"])
    model.meta.model_copy(update={"history": None}).write(tmp_path / "m", model.networks.state_dict())
    export(tmp_path / "m", tmp_path / "out", "torchscript")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.ts", "medpfl.json"}
