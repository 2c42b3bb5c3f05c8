# SPDX-License-Identifier: Apache-2.0
"""State on disk: one safetensors file with tensors and JSON, written atomically; nothing is ever unpickled."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medpfl.core.errors import MedPFLError

_META = "medpfl"
FORMAT = 1

Meta = dict[str, JsonValue]
"""What a file says beside its tensors."""


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, object]) -> None:
    """Write tensors and a JSON-able ``meta``; a reader sees the old file or the new one, never half of it.

    Raises:
        MedPFLError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(content, temporary, metadata={_META: json.dumps({"format": FORMAT, **meta})})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise MedPFLError(f"cannot write {path}: {error}") from error


def read_meta(path: Path) -> Meta:
    """The ``meta`` that ``save`` wrote, without reading the tensors.

    Raises:
        MedPFLError: the file is missing, broken or of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return _meta_of(file, path)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise MedPFLError(f"cannot read {path}: {error}") from error


def _meta_of(file: Any, path: Path) -> Meta:
    meta: Any = json.loads((file.metadata() or {}).get(_META, "{}"))
    if not isinstance(meta, dict) or type(meta.get("format")) is not int:
        raise MedPFLError(f"{path}: not a file of MedPFL's")
    if meta["format"] != FORMAT:
        raise MedPFLError(f"{path}: expected format {FORMAT}, got {meta['format']}: made by another version of MedPFL")
    return meta


def read(path: Path) -> tuple[dict[str, Tensor], Meta]:
    """What ``save`` wrote.

    Raises:
        MedPFLError: the file is missing, broken or of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            meta = _meta_of(file, path)
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise MedPFLError(f"cannot read {path}: {error}") from error


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, whatever their order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        MedPFLError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror}") from error


def numbered(folder: Path, kind: str) -> dict[int, Path]:
    """Files ``<kind>-<round>.safetensors`` in a folder, by round."""
    pattern = re.compile(rf"{re.escape(kind)}-(\d+)\.safetensors")
    found = {}
    for path in folder.glob(f"{kind}-*.safetensors"):
        if match := pattern.fullmatch(path.name):
            found[int(match[1])] = path
    return found


def path_of(folder: Path, kind: str, round_number: int) -> Path:
    """Where the file ``kind`` of a round lies."""
    return folder / f"{kind}-{round_number:05d}.safetensors"
