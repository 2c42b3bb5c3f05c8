# SPDX-License-Identifier: Apache-2.0
"""The file of the key that all hospitals of a federation share: made once, carried to them by hand, never to the
server."""

import os
import stat
from pathlib import Path

import numpy as np
import torch

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.privacy.ckks import Key

FILE = "hospitals.key"
_KIND = "encryption key"


def make_key(folder: Path) -> tuple[Path, Key]:
    """Write a new key into ``folder``, for its owner's eyes only; an existing one is never overwritten.

    Raises:
        MedPFLError: there is one already, or it cannot be written.
    """
    path = folder / FILE
    if path.exists():
        raise MedPFLError(f"{path} is there already and is not overwritten: models that it encrypted need it")
    key = Key.new()
    before = os.umask(0o077)
    try:
        written = torch.from_numpy(np.frombuffer(key.dump(), np.uint8).copy())
        store.save(path, {"key": written}, {"kind": _KIND, "fingerprint": key.fingerprint})
    finally:
        os.umask(before)
    return path, key


def read_key(path: Path) -> Key:
    """The key of a file that only its owner may read.

    Raises:
        MedPFLError: others may read it, it is missing or damaged, or it is no key.
    """
    try:
        open_to = stat.S_IMODE(path.stat().st_mode) & 0o077
    except OSError as error:
        raise MedPFLError(f"cannot read the key {path}: {error.strerror}") from error
    if open_to:
        raise MedPFLError(f"others than its owner may use the key {path}: chmod 600 {path}")
    tensors, meta = store.read(path)
    if meta.get("kind") != _KIND or list(tensors) != ["key"] or tensors["key"].dtype != torch.uint8:
        raise MedPFLError(f"{path} is no key of 'medpfl keys make'")
    try:
        return Key(tensors["key"].numpy().tobytes())
    except ValueError as error:
        raise MedPFLError(f"{path}: {error}") from error
