# SPDX-License-Identifier: Apache-2.0
"""``benchmarks fuzz``: what is no message of the round loop: state files, jobs' JSON, ciphertexts."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from medpfl import store
from medpfl.bundle import find_bundle
from medpfl.job import load_job
from medpfl.privacy import ckks

Attempt = Callable[[], None]

EXTREMES: list[Any] = [
    2**31, 2**63, -(2**63), 1e308, 5e-324, 10**400, [1e308] * 3, [0], [2**40] * 3, "auto", [None], ["*"] * 1000,
    {"path": "os.system", "args": {"command": "true"}}, {"path": "medpfl.job.load_job", "args": {}},
    {"path": "medpfl.models.auto.Auto", "args": {}},
    {"path": "medpfl.privacy.DPSGD", "args": {"noise_multiplier": 1e-300, "max_grad_norm": 1e300}},
    {"path": "medpfl.privacy.DPSGD", "args": {"target_epsilon": 1e-300}},
    {"path": "medpfl.privacy.ClippedNoise", "args": {"clip": 1e300, "noise_multiplier": 0}},
    {"path": "medpfl.methods.optimizers.Adam", "args": {"betas": [0, 0], "eps": 1e308}},
    {"path": "medpfl.methods.schedules.WarmUp", "args": {"rounds": 5e-324, "then": "cosine"}},
    {"path": "medpfl.augment.values.Hide", "args": {"share": 1e308}},
    {"path": "medpfl.tasks.losses.CrossEntropy", "args": {"weights": [1e308, 0]}},
    {"checkpoint": "../x", "frozen": [""]},
]  # fmt: skip
NAMED = ("privacy", "encryption", "architecture", "start", "schedule", "optimizer", "augment", "size", "loss", "frozen")


def state(rng: random.Random, folder: Path) -> Attempt:
    """A state file with other bytes."""
    path = folder / "state.safetensors"
    store.save(path, {"w": torch.arange(20.0)}, {"round": 3})
    path.write_bytes(_altered(rng, bytearray(path.read_bytes())))

    def attempt() -> None:
        tensors, meta = store.read(path)
        assert set(tensors) == {"w"} and torch.equal(tensors["w"], torch.arange(20.0)), "altered tensors"
        assert meta["round"] == 3, "altered facts"

    return attempt


def _altered(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.choice((1, 1, 3))):
        place = rng.randrange(len(data))
        cut = rng.choice(("flip", "flip", "cut", "grow", "drop"))
        if cut == "flip":
            data[place] ^= 1 << rng.randrange(8)
        elif cut == "cut":
            del data[max(1, place) :]
        elif cut == "grow":
            data[place:place] = rng.randbytes(rng.randrange(1, 40))
        else:
            del data[place : place + rng.randrange(1, 40)]
        data = data or bytearray(b"\0")
    return data


def job(rng: random.Random, folder: Path, odd: list[Any]) -> Attempt:
    """One of the package's jobs with another value in one place of its JSON, or an argument that it did not have."""
    chosen = rng.choice(sorted((find_bundle() / "jobs").iterdir()))
    copy = folder / "job"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(chosen, copy)
    file = rng.choice(sorted(copy.rglob("*.json")))
    content = json.loads(file.read_text(encoding="utf-8"))
    places = list(_places(content))
    arguments = [holder[key] for holder, key in places if key == "args" and isinstance(holder[key], dict)]
    if arguments and rng.random() < 0.4:
        rng.choice(arguments)[rng.choice(NAMED)] = deepcopy(rng.choice(EXTREMES))
    else:
        holder, key = rng.choice(places)
        holder[key] = deepcopy(rng.choice(EXTREMES + odd))
    file.write_text(json.dumps(content), encoding="utf-8")

    def attempt() -> None:
        load_job(copy)

    return attempt


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def can_encrypt() -> bool:
    """Whether TenSEAL is here."""
    return find_spec("tenseal") is not None


@cache
def _honest() -> tuple[ckks.Key, bytes, bytes]:
    """A key, a ciphertext, and what SEAL has compressed in it."""
    key = ckks.Key.new()
    (block,) = key.encrypt(np.arange(100.0))
    return key, block, pa.input_stream(pa.BufferReader(block[_START + 16 : -9]), compression="zstd").read()


_START = len(ckks._HEAD) + 3
"""Where SEAL's part of a block begins, whose length takes three bytes here."""
_COMPRESSIONS = (0, 0, 0, 0, 1, 2, 3)


def ciphertext(rng: random.Random) -> Attempt:
    """A ciphertext whose lengths are right and whose content is not, not compressed, so that SEAL reads what was
    changed: the numbers in its head, mostly. An error of memory there would end the process."""
    key, block, honest = _honest()
    data = bytearray(honest)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(105) if rng.random() < 0.9 else rng.randrange(len(data))
        number = rng.choice((0, 1, 2, 3, 16, 17, 2**13, 2**14, 2**17, 2**32, 2**40, 2**61, 2**63, 2**64 - 1))
        data[place - place % 8 : place - place % 8 + 8] = number.to_bytes(8, "little")
    if rng.random() < 0.3:
        data = _altered(rng, data)[: len(honest)]
    length = 16 + len(data)
    seal = struct.pack("<HBBBBHQ", ckks._MAGIC, 16, 4, 3, rng.choice(_COMPRESSIONS), 0, length)
    said = bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14])
    sent = ckks._HEAD + said + seal + bytes(data) + ckks._TAIL

    def attempt() -> None:
        ckks.check_block(sent)
        # What has the right form may be summed up; only a hospital, which has the key, can tell what is in it.
        ckks.weighted_rows(np.array([[0.5, 0.5], [0.25, 0.75]]), [[sent], [block]])
        assert np.abs(key.decrypt([sent], 100)).max() <= ckks.LARGEST + 1, "numbers out of bounds"

    return attempt
