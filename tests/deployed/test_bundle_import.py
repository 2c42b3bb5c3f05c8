# SPDX-License-Identifier: Apache-2.0
"""MONAI bundles as start weights: the imported network computes what the bundle's does; nothing in a bundle runs."""

import dataclasses
import inspect
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from medpfl import store
from medpfl.cli import app
from medpfl.component import build
from medpfl.core.errors import MedPFLError
from medpfl.data.site_file import load_site_file
from medpfl.deployed.bundle_import import import_bundle
from medpfl.deployed.bundle_table import TABLE
from medpfl.methods.start import Start, Started
from medpfl.models.contract import Architecture
from small_jobs import write_table_sites

PLAIN = {"in_channels": 1, "out_channels": 3}
BUNDLES: dict[str, dict[str, Any]] = {  # as MONAI's own bundles write them
    "UNet": {"channels": [4, 8, 8], "strides": [2, 2], "num_res_units": 2, "norm": "batch"},
    "UNet, norm not said": {"channels": [4, 8], "strides": [2]},
    "AttentionUnet": {"channels": [4, 8], "strides": [2]},
    "DynUNet": {
        "kernel_size": [3, [3, 3], 3], "strides": [1, 2, [2, 1]], "upsample_kernel_size": [2, [2, 1]],
        "filters": [2, 4, 4], "norm_name": "instance", "deep_supervision": True, "deep_supr_num": 1, "res_block": True,
    },
    "SegResNet": {"init_filters": 8, "blocks_down": [1, 2], "blocks_up": [1], "dropout_prob": 0.2},
    "UNETR": {"img_size": [32, 32], "feature_size": 2, "hidden_size": 8, "mlp_dim": 8, "num_heads": 2},
    "SwinUNETR": {
        "feature_size": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 2, "use_checkpoint": True,
    },
    "VNet": {"dropout_prob_down": 0.5},
    "BasicUNetPlusPlus": {"features": [2, 2, 2, 2, 2, 2], "norm": ["instance", {"affine": True}]},
    "DenseNet121": {},
    "SEResNet50": {},
}  # fmt: skip
LARGE = ("VNet", "DenseNet121", "SEResNet50", "SwinUNETR", "UNETR")


def plain(kind: str) -> dict[str, Any]:
    """Channels and outputs as MONAI calls them."""
    return {"in_channels": 1, "num_classes": 3} if kind.startswith("SEResNet") else PLAIN


def theirs(name: str, args: dict[str, Any]) -> nn.Module:
    """MONAI's own network, whose norms have seen data."""
    from monai.networks import nets

    kind = name.partition(",")[0]
    torch.manual_seed(3)
    network: nn.Module = getattr(nets, kind)(spatial_dims=2, **plain(kind), **args)
    for tensor in network.parameters():
        tensor.data.add_(0.01)
    network.train()(torch.randn(2, 1, 64, 64) if kind != "UNETR" else torch.randn(2, 1, 32, 32))
    return network.eval()


def bundle(folder: Path, name: str, args: dict[str, Any], network: nn.Module | None, **more: Any) -> Path:
    (folder / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    definition = {"_target_": name, "spatial_dims": 2, **plain(name), **args}
    content = {"imports": ["$import glob"], "device": "$torch.device('cpu')", **more, "network_def": definition}
    (folder / "configs" / "inference.json").write_text(json.dumps(content))
    if network is not None:
        torch.save(network.state_dict(), folder / "models" / "model.pt")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LARGE)) for one in BUNDLES])
def test_the_imported_network_computes_what_the_bundles_does(name: str, tmp_path: Path) -> None:
    network = theirs(name, BUNDLES[name])
    written = bundle(tmp_path / "b", name.partition(",")[0], BUNDLES[name], network)
    done = import_bundle(written, tmp_path / "out.safetensors")
    architecture: Architecture = build(done.architecture, Architecture, "here")
    assert (done.channels, done.outputs) == (1, 3)
    size = (32, 32) if name == "UNETR" else (64, 64)
    tensors, meta = store.read(tmp_path / "out.safetensors")
    assert meta["kind"] == "checkpoint" and store.fingerprint(tensors) == done.sha256
    ours = Started(Start("it"), tensors).put_into(architecture.build((1, *size), 3)).eval()
    inputs = torch.randn(2, 1, *size)
    expected = network(inputs)
    expected = expected[0] if isinstance(expected, list | tuple) else expected
    torch.testing.assert_close(ours(inputs), expected, rtol=1e-4, atol=1e-5)


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.slow
def test_what_a_bundle_does_not_say_of_its_network_is_as_monai_has_it(tmp_path: Path) -> None:
    """MONAI's own bundle for BraTS does not say that its network is for volumes."""
    from monai.networks import nets

    for name, known in TABLE.items():
        taken = inspect.signature(nets.SENet if name.startswith("SEResNet") else getattr(nets, name)).parameters
        assert set(known.plain) <= taken.keys()
        has = {key: taken[key].default for key in known.plain if taken[key].default is not inspect.Parameter.empty}
        assert known.usual == has, name
        ours = {each.name: each.default for each in dataclasses.fields(known.kind)} | dict(known.given)
        for argument, mine in known.same.items():
            default = taken[argument].default
            if default not in (inspect.Parameter.empty, None):
                assert _listed(ours[mine]) == _listed(default), f"{name}'s {argument}"
    args = {"init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1], "in_channels": 4, "out_channels": 3}
    torch.manual_seed(3)
    network = nets.SegResNet(**args).eval()
    folder = bundle(tmp_path / "b", "SegResNet", args, network)
    config = folder / "configs" / "inference.json"
    content = json.loads(config.read_text())
    del content["network_def"]["spatial_dims"]
    config.write_text(json.dumps(content))
    done = import_bundle(folder, tmp_path / "out.safetensors")
    assert (done.channels, done.outputs) == (4, 3)
    architecture: Architecture = build(done.architecture, Architecture, "here")
    tensors, _ = store.read(tmp_path / "out.safetensors")
    ours = Started(Start("it"), tensors).put_into(architecture.build((4, 8, 8, 8), 3)).eval()
    inputs = torch.randn(1, 4, 8, 8, 8)
    torch.testing.assert_close(ours(inputs), network(inputs), rtol=1e-4, atol=1e-5)


def test_every_network_of_the_table_is_tried() -> None:
    assert set(TABLE) - {name.partition(",")[0] for name in BUNDLES} == {
        "DenseNet169", "DenseNet201", "DenseNet264", "SEResNet101", "SEResNet152",
    }  # fmt: skip


def test_the_command_and_a_site_file(tmp_path: Path) -> None:
    """Class paths in full, references to numbers, YAML, safetensors."""
    network = theirs("UNet", BUNDLES["UNet"])
    args = {
        **BUNDLES["UNet"],
        "out_channels": "@classes",
        "channels": "@sizes#wide",
        "_desc_": "a note",
        "dropout": None,
    }
    folder = bundle(tmp_path / "b", "monai.networks.nets.unet.UNet", args, None, classes=3, sizes={"wide": [4, 8, 8]})
    content = json.loads((folder / "configs" / "inference.json").read_text())
    (folder / "configs" / "inference.json").unlink()
    (folder / "configs" / "train.yaml").write_text(yaml.safe_dump(content))
    save_file(dict(network.state_dict()), folder / "models" / "model.safetensors")
    out = tmp_path / "start.safetensors"
    done = CliRunner().invoke(app, ["bundle", "import", str(folder), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert '"path": "medpfl.models.unet.UNet"' in done.output and "for 1 channels and 3 outputs" in done.output
    (file,) = write_table_sites(tmp_path / "sites", ["anna"]).values()
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "checkpoints": {"unet": str(out)}}))
    read = load_site_file(file, "anna").checkpoint("unet")
    assert all(torch.equal(read[key], value) for key, value in network.state_dict().items())
    again = CliRunner().invoke(app, ["bundle", "import", str(folder), "--out", str(out)])
    assert again.exit_code == 1 and "exists already" in str(again.exception)


def test_weights_that_are_not_numbers(tmp_path: Path) -> None:
    network = theirs("UNet", {"channels": [4, 8], "strides": [2]})
    with torch.no_grad():
        next(network.parameters()).fill_(float("nan"))
    folder = bundle(tmp_path / "b", "UNet", {"channels": [4, 8], "strides": [2]}, network)
    with pytest.raises(MedPFLError, match="holds weights that are not numbers"):
        import_bundle(folder, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


SMALL = {"channels": [4, 8], "strides": [2]}
EVIL = "$__import__('os').system('touch {}')"


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("UNet", {**SMALL, "channels": EVIL}, "the network: 'channels' is an expression, which is never evaluated"),
        ("UNet", {**SMALL, "channels": [4, EVIL]}, "'channels' is an expression, which is never evaluated"),
        ("UNet", {**SMALL, "norm": ["batch", {"affine": EVIL}]}, "'norm.affine' is an expression"),
        ("UNet", {**SMALL, "channels": "@code"}, "refers to '@code', which is no plain number but"),
        ("UNet", {**SMALL, "channels": "@gone"}, "refers to '@gone', which is not there"),
        ("UNet", {**SMALL, "dropout": "2 * @classes"}, "'dropout' is an expression"),
        ("UNet", {**SMALL, "channels": "%other.json#channels"}, "'channels' is an expression"),
        ("UNet", {**SMALL, "norm": {"_target_": "os.system"}}, "'norm' is a component .*only plain values are read"),
        ("os.system", {"command": "touch {}"}, "'_target_' must be one of MONAI's networks UNet, .* got 'os.system'"),
        ("evil.UNet", SMALL, "got 'evil.UNet', and nothing else is built or imported"),
        (EVIL, SMALL, "'_target_' must be one of MONAI's networks"),
        (
            "torch.jit.load",
            {"f": "$@bundle_root + '/models/model.ts'"},
            "it is TorchScript, which is a program, .*declare the model's own",
        ),
        ("UNett", SMALL, "did you mean 'UNet'"),
        ("UNet", {**SMALL, "act": "relu"}, "UNet's 'act' must be 'prelu' here, got 'relu'"),
        ("UNet", {**SMALL, "strides": [4]}, r"UNet's 'strides' must be 2 here, got \[4\]"),
        ("UNet", {**SMALL, "kernelsize": 3}, "'kernelsize' has no counterpart here; did you mean 'kernel_size'"),
        ("UNet", {**SMALL, "norm": "layer"}, "must be batch, instance, or group with 8 groups here, got 'layer'"),
        ("UNet", {**SMALL, "channels": ["a", "b"]}, "argument 'channels' of UNet must be a list of whole numbers"),
        ("UNet", {**SMALL, "in_channels": True}, "UNet's 'in_channels' must be a whole number from 1, got True"),
        ("UNet", {**SMALL, "in_channels": 10**9}, "UNet's 'in_channels' must be a whole number from 1, got 1000000000"),
        ("UNet", {**SMALL, "channels": [4, 9]}, "has the shape .* in the weights, .* in the network"),
        ("UNet", {**SMALL, "channels": [4, 8, 8], "strides": [2, 2]}, "the weights have|the weights lack"),
        ("UNet", {**SMALL, "channels": [100_000, 100_000]}, "the job's networks have more than"),
        ("SwinUNETR", {"feature_size": 12 * 8000}, "more than"),
        (
            "DynUNet",
            {"kernel_size": [3] * 3, "strides": [2, 2, 2], "upsample_kernel_size": [2, 2]},
            "must begin with 1",
        ),
        ("DynUNet", {"kernel_size": 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}, "must be a list, got 3"),
    ],
)
def test_code_and_what_is_not_known_are_refused(target: str, args: dict[str, Any], words: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = json.dumps(args).replace("{}", str(mark))
    folder = bundle(
        tmp_path / "b", target.replace("{}", str(mark)), json.loads(text), theirs("UNet", SMALL),
        code=EVIL.replace("{}", str(mark)), classes=3,
    )  # fmt: skip
    with pytest.raises(MedPFLError, match=words):
        import_bundle(folder, tmp_path / "out.safetensors")
    assert not mark.exists() and not (tmp_path / "out.safetensors").exists()


class Evil:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.slow
def test_weights_with_code_in_them(tmp_path: Path) -> None:
    folder, mark = bundle(tmp_path / "b", "UNet", SMALL, None), tmp_path / "ran"
    path, out = folder / "models" / "model.pt", tmp_path / "out.safetensors"
    torch.save({"model": Evil(mark)}, path)
    with pytest.raises(MedPFLError, match=r"it must hold tensors and nothing else, .* nothing in it was run"):
        import_bundle(folder, out)
    path.write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(MedPFLError, match="in torch's zip format; nothing in it was run"):
        import_bundle(folder, out)
    torch.save([1, 2], path)
    with pytest.raises(MedPFLError, match="expected a state dict of tensors by name"):
        import_bundle(folder, out)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(2**28 + 1))
    with pytest.raises(MedPFLError, match="torch writes weights as they are"):
        import_bundle(folder, out)
    path.unlink()
    with pytest.raises(MedPFLError, match=r"no weights: models/model.safetensors or models/model.pt"):
        import_bundle(folder, out)
    (folder / "models" / "model.ts").write_bytes(b"")
    with pytest.raises(MedPFLError, match="its weights are TorchScript, which is a program"):
        import_bundle(folder, out)
    (folder / "models" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(MedPFLError, match=r"cannot read .*model\.safetensors"):
        import_bundle(folder, out)
    assert not mark.exists() and not out.exists()


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.zeros(1).expand(10**12)},
        {"a": torch.zeros(3).to_sparse()},
        {"a": torch.zeros(3, device="meta")},
        {"a": torch.zeros(3, dtype=torch.complex64)},
    ],
    ids=["repeated", "sparse", "without values", "complex"],
)
def test_tensors_that_do_not_hold_their_values(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """One number that stands for a million millions would make room for a network of that size."""
    folder = bundle(tmp_path / "b", "UNet", {"channels": [4, 8], "strides": [2]}, None)
    torch.save(state, folder / "models" / "model.pt")
    with pytest.raises(MedPFLError, match=r"model\.pt: 'a' is no dense tensor of real numbers"):
        import_bundle(folder, tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no MONAI bundle: a 'network_def' in configs/inference.json"),
        ("{}", "no MONAI bundle"),
        ("{", "cannot read .*inference.json"),
        ("[" * 100_000, "cannot read .*inference.json"),
        ('{"network_def": "$import os"}', "'network_def' must be a mapping with '_target_', got '.import os'"),
        ('{"network_def": {"channels": [1]}}', "'_target_' must be one of MONAI's networks"),
    ],
)
def test_what_is_no_bundle(content: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    if content is not None:
        (tmp_path / "configs" / "inference.json").write_text(content)
    with pytest.raises(MedPFLError, match=words):
        import_bundle(tmp_path, tmp_path / "out.safetensors")
