# SPDX-License-Identifier: Apache-2.0
"""MONAI bundles that are damaged, or made to do harm: one sentence, and no more memory than the files are large."""

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from medpfl.core.errors import MedPFLError
from medpfl.deployed.bundle_import import import_bundle

UNET = {
    "_target_": "UNet", "spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": [4, 8], "strides": [2],
    "num_res_units": 2, "norm": "batch",
}  # fmt: skip
DEEP = "[" * 900 + "]" * 900


def network() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(2, 1, 2, (4, 8), (2,), num_res_units=2, norm="batch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b" / "configs").mkdir(parents=True)
    (tmp_path / "b" / "models").mkdir()
    (tmp_path / "b" / "configs" / "inference.json").write_text(json.dumps({"network_def": UNET}))
    torch.save(network().state_dict(), tmp_path / "b" / "models" / "model.pt")
    return tmp_path / "b"


def refused(folder: Path, words: str) -> None:
    with pytest.raises(MedPFLError, match=words) as raised:
        import_bundle(folder, folder.parent / "out.safetensors")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 2500
    assert not (folder.parent / "out.safetensors").exists()


def packed(folder: Path, entries: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(folder / "models" / "model.pt", "w", how) as archive:
        for name, content in {"archive/version": b"3\n", **entries}.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02.",
        b"\x80\x02h\x05.",
        b"\x80\x02)R.",
        b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02X\x01\x00\x00\x00aq\x00(h\x00h\x00tb.",
    ],
)
def test_weights_that_torchs_reader_fails_on(pickled: bytes, folder: Path) -> None:
    packed(folder, {"archive/data.pkl": pickled})
    refused(folder, r"cannot read .*model\.pt: it must hold tensors and nothing else, in torch's zip format")


@pytest.mark.parametrize("place", [0.3, 0.5, 0.7])
def test_weights_with_a_byte_that_changed(place: float, folder: Path) -> None:
    """Torch's reader looks at no checksum: the job began with other weights, in silence."""
    path = folder / "models" / "model.pt"
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:  # of the largest tensor
        tensors = [one for one in archive.infolist() if "/data/" in one.filename]
    member = max(tensors, key=lambda one: one.file_size)
    content[member.header_offset + 128 + int(place * (member.file_size - 128))] ^= 1
    path.write_bytes(content)
    refused(folder, r"cannot read .*model\.pt: .*'model/data/\d+' is damaged$")


def test_many_members_that_grow(folder: Path) -> None:
    """Each of them was below the bound; all together would be gigabytes."""
    packed(folder, {f"archive/data/{number}": bytes(2**22) for number in range(40)}, zipfile.ZIP_DEFLATED)
    size = (folder / "models" / "model.pt").stat().st_size
    assert size < 2**20
    refused(
        folder, rf"model\.pt: it has {size} bytes and would become {40 * 2**22 + 2}; torch writes weights as they are"
    )


def test_one_memory_that_stands_for_many_tensors(folder: Path) -> None:
    """A network may be as large as the weights need it, and these are one and the same."""
    held = torch.zeros(2**20)
    torch.save({f"more.{number}": held for number in range(400)}, folder / "models" / "model.pt")
    content = {"network_def": {**UNET, "channels": [256, 4096]}}
    (folder / "configs" / "inference.json").write_text(json.dumps(content))
    refused(folder, "networks have more than")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"network_def": {**UNET, "spatial_dims": 7}}), "UNet's 'spatial_dims' must be 2 or 3, got 7"),
        (f'{{"network_def": {{"_target_": "UNet", "channels": {DEEP}}}}}', "the network: it is nested too deeply"),
        (f'{{"network_def": {{"_target_": "UNet", "channels": {"[" * 40 + "]" * 40}}}}}', "it is nested too deeply"),
        (f'{{"network_def": {DEEP}}}', r"must be a mapping with '_target_', got \[+"),
        (f'{{"a": {DEEP}, "network_def": {{"_target_": "UNet", "channels": "@a"}}}}', r"no plain number but \[+"),
        (json.dumps({"a": [1], "network_def": {**UNET, "channels": "@a#" + "9" * 5000}}), "which is not there"),
    ],
    ids=["axes", "deep", "forty", "deep network", "deep reference", "digits"],
)
def test_configurations_that_no_network_has(text: str, words: str, folder: Path) -> None:
    (folder / "configs" / "inference.json").write_text(text)
    refused(folder, words)


def test_an_archive_that_is_cut_off(folder: Path) -> None:
    path = folder / "models" / "model.pt"
    path.write_bytes(path.read_bytes()[:-30])
    refused(folder, r"cannot read .*model\.pt")
    path.write_bytes(io.BytesIO().getvalue())
    refused(folder, r"cannot read .*model\.pt")
