# SPDX-License-Identifier: Apache-2.0
"""The network and the weights of a MONAI bundle, as a checkpoint that jobs can start from.

A bundle is a folder that somebody else wrote. Of its configuration plain values are read, and references to plain
numbers are followed; expressions are not evaluated, classes are looked up in a table, and of its weights tensors alone
are read.
"""

import json
import reprlib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
import yaml
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from medpfl import store
from medpfl.component import Spec, construct, spec_of
from medpfl.core.errors import ConfigError, DataError, MedPFLError
from medpfl.core.sizes import Bounded
from medpfl.core.tied import own_state
from medpfl.data.site_file import CHECKPOINT
from medpfl.data.untrusted import load_yaml
from medpfl.deployed.bundle_table import Known, arguments, known
from medpfl.models.contract import Architecture

CONFIGS = ("inference.json", "train.json", "inference.yaml", "train.yaml")
WEIGHTS = ("model.safetensors", "model.pt")
_LONGEST = 2**24
"""Bytes of a configuration."""
_DEEPEST = 16
"""Lists within lists of a value. Python's own bound is another in each process: packages raise it."""
_SPARE = 2**24
"""Entries that the network may have beyond those of the weights."""
_UNREADABLE = (
    OSError, zipfile.BadZipFile, zlib.error, UnpicklingError, RuntimeError, ValueError, EOFError, LookupError,
    TypeError, AttributeError, ArithmeticError, AssertionError, ImportError, MemoryError,
)  # fmt: skip
"""What torch's reader raises of a pickle that is none."""
_TOLD = ("_desc_",)
_DROPPED = ("skip_layers.", "heads.")
"""What MONAI's DynUNet lists a second time."""


@dataclass(frozen=True)
class Imported:
    """``architecture``: what a job names to train on; ``channels`` and ``outputs``: those of the bundle's inputs and
    results; ``sha256``: of the tensors."""

    architecture: Spec
    channels: int
    outputs: int
    sha256: str


def import_bundle(folder: Path, target: Path) -> Imported:
    """Write the bundle's weights as a checkpoint that site files can declare.

    Args:
        folder: the bundle, with ``configs`` and ``models``.
        target: the checkpoint, a new .safetensors file.

    Raises:
        MedPFLError: the folder is no bundle, it holds code where a value is needed, its network is none of the table's,
            or its weights cannot be read or are of another network.
    """
    if target.exists():
        raise MedPFLError(f"{target} exists already; remove it or write to another file")
    config = _config(folder)
    try:
        definition = _definition(config.content)
        name, found = known(definition.get("_target_"))
        given = {key: _plain(config.content, key, value) for key, value in definition.items() if key != "_target_"}
        given = {key: value for key, value in given.items() if key not in _TOLD}
        axes, channels, outputs = (_number(name, {**found.usual, **given}, key) for key in found.plain)
        if axes not in (2, 3):
            raise ConfigError(f"{name}'s '{found.plain[0]}' must be 2 or 3, got {axes}")
        architecture = construct(found.kind, arguments(name, found, given), name)
    except ConfigError as error:
        raise MedPFLError(f"{config.path}: the network: {error}") from error
    weights = _weights(folder)
    try:
        network = _built(architecture, axes, channels, outputs, given, weights)
        tensors = _fitted(network, found, weights)
    except ConfigError as error:
        raise MedPFLError(f"{folder}: {error}") from error
    digest = store.fingerprint(tensors)
    spec = spec_of(architecture)
    store.save(
        target, tensors, {"kind": CHECKPOINT, "bundle": folder.resolve().name, "network": spec, "sha256": digest}
    )
    return Imported(spec, channels, outputs, digest)


# -- the configuration ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Config:
    path: Path
    content: dict[str, JsonValue]


def _config(folder: Path) -> _Config:
    for name in CONFIGS:
        path = folder / "configs" / name
        if not path.is_file():
            continue
        try:
            if path.suffix == ".json":
                if path.stat().st_size > _LONGEST:
                    raise ValueError(f"it has more than {_LONGEST} bytes")
                content = json.loads(path.read_text(encoding="utf-8"))
            else:
                content = load_yaml(path)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise MedPFLError(f"cannot read {path}: {error}") from error
        if isinstance(content, dict) and ("network_def" in content or "network" in content):
            return _Config(path, content)
    raise MedPFLError(
        f"{folder}: no MONAI bundle: a 'network_def' in {' or '.join(f'configs/{one}' for one in CONFIGS)}"
    )


def _definition(content: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    definition = content.get("network_def", content.get("network"))
    if not isinstance(definition, dict):
        raise ConfigError(f"'network_def' must be a mapping with '_target_', got {reprlib.repr(definition)}")
    return definition


def _plain(content: Mapping[str, JsonValue], key: str, value: JsonValue, deep: int = 0) -> JsonValue:
    """The value, with references to plain numbers in their places.

    Raises:
        ConfigError: it is, or refers to, more than that, or is nested too deeply.
    """
    if deep > _DEEPEST:
        raise ConfigError(f"it is nested too deeply: more than {_DEEPEST} levels below one of its arguments")
    if isinstance(value, list):
        return [_plain(content, key, one, deep + 1) for one in value]
    if isinstance(value, dict):
        if "_target_" in value:
            raise ConfigError(f"'{key}' is a component ({value['_target_']!r}); only plain values are read")
        return {name: _plain(content, f"{key}.{name}", one, deep + 1) for name, one in value.items()}
    if not isinstance(value, str):
        return value
    if value.startswith("@"):
        return _referred(content, key, value)
    if value.startswith(("$", "%")) or "@" in value:
        raise ConfigError(f"'{key}' is an expression, which is never evaluated: {value!r}")
    return value


def _referred(content: Mapping[str, JsonValue], key: str, value: str) -> JsonValue:
    found: JsonValue = dict(content)
    for part in value[1:].replace("::", "#").split("#"):
        if isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            raise ConfigError(f"'{key}' refers to {value!r}, which is not there")
    numbers = found if isinstance(found, list) else [found]
    if not all(isinstance(one, int | float) for one in numbers):
        raise ConfigError(f"'{key}' refers to {value!r}, which is no plain number but {reprlib.repr(found)}")
    return found


def _number(name: str, given: Mapping[str, JsonValue], key: str) -> int:
    value = given.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 4096:
        raise ConfigError(f"{name}'s '{key}' must be a whole number from 1, got {value!r}")
    return value


# -- the weights ------------------------------------------------------------------------------------------------------


def _weights(folder: Path) -> dict[str, Tensor]:
    for name in WEIGHTS:
        path = folder / "models" / name
        if path.is_file():
            return _safe(path) if path.suffix == ".safetensors" else _pickled(path)
    if list((folder / "models").glob("*.ts")):
        raise MedPFLError(
            f"{folder}: its weights are TorchScript, which is a program, and is not read; models/model.pt or "
            "models/model.safetensors is needed"
        )
    raise MedPFLError(f"{folder}: no weights: {' or '.join(f'models/{one}' for one in WEIGHTS)}")


def _safe(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise MedPFLError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from error


def _pickled(path: Path) -> dict[str, Tensor]:
    """Tensors alone: torch's restricted reader refuses whatever else a pickle names."""
    try:
        with zipfile.ZipFile(path) as archive:
            whole, size = sum(member.file_size for member in archive.infolist()), path.stat().st_size
            if whole > size:  # compressed, or one content under several names
                told = f"has {size} bytes and would become {whole}; torch writes weights as they are"
                raise DataError(f"cannot read {path}: it {told}")
            if damaged := archive.testzip():  # torch does not look at checksums
                raise DataError(f"cannot read {path}: what it holds under '{damaged}' is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except _UNREADABLE as error:
        raise MedPFLError(
            f"cannot read {path}: it must hold tensors and nothing else, in torch's zip format; nothing in it was run: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(one, Tensor) for key, one in content.items()
    ):
        raise MedPFLError(f"{path}: expected a state dict of tensors by name")
    for key, one in content.items():
        if not _holds_its_values(one):
            raise MedPFLError(f"{path}: '{key}' is no dense tensor of real numbers, each stored for itself")
    return dict(content)


def _holds_its_values(tensor: Tensor) -> bool:
    """Torch's reader also takes a number that stands for any number of values, and tensors without values."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _values(weights: Mapping[str, Tensor]) -> int:
    """How many values they hold; several names may stand for one memory."""
    memories = {one.untyped_storage().data_ptr(): one for one in weights.values()}
    return sum(one.untyped_storage().nbytes() // one.element_size() for one in memories.values())


def _built(
    architecture: Architecture,
    axes: int,
    channels: int,
    outputs: int,
    given: Mapping[str, JsonValue],
    weights: Mapping[str, Tensor],
) -> nn.Module:
    lengths = [2 * length for length in architecture.multiples(axes) or (32,) * axes]
    if "img_size" in given and architecture.fixed:
        size = given["img_size"]
        listed = size if isinstance(size, list) else [size] * axes
        lengths = [_number("the network", {"img_size": one}, "img_size") for one in listed]
    with torch.random.fork_rng(devices=[]), Bounded(_SPARE + 2 * _values(weights)):
        return architecture.build((channels, *lengths), outputs)


def _fitted(network: nn.Module, found: Known, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names; norms that have none in the bundle multiply by 1 and add 0, as they do there."""
    state = own_state(network)
    named = {f"{found.inside}{key}": one for key, one in weights.items() if not key.startswith(_DROPPED)}
    for key in [key for key in named if key not in network.state_dict()]:
        if not key.endswith("relative_position_index") and ".norm_cross_attn." not in key:
            raise ConfigError(f"the weights have '{key}', which the network has not")
        del named[key]
    for key, ours in state.items():
        if key not in named:
            if not isinstance(network.get_submodule(key.rpartition(".")[0]), nn.InstanceNorm2d | nn.InstanceNorm3d):
                raise ConfigError(f"the weights lack '{key}'")
            named[key] = ours
        if named[key].shape != ours.shape:
            raise ConfigError(
                f"'{key}' has the shape {list(named[key].shape)} in the weights, {list(ours.shape)} in the network"
            )
    fitted = {key: named[key].detach().to(ours.dtype) for key, ours in state.items()}
    for key, tensor in fitted.items():
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"'{key}' holds weights that are not numbers (NaN or infinite)")
    return fitted
