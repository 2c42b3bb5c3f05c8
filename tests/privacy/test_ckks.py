# SPDX-License-Identifier: Apache-2.0
"""Encrypted sums are plain ones, and nothing else is taken for a ciphertext."""

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medpfl.core.errors import CodecError
from medpfl.core.mixers import Mean, RoundInfo, SoftPull
from medpfl.core.mixing import restrict
from medpfl.privacy import ckks

PRESENT = (True, False, True, True)
INFO = RoundInfo(("a", "b", "c", "d"), np.array([10.0, 20.0, 30.0, 7.0]), (True,) * 4)
GENERAL = np.random.default_rng(1).dirichlet(np.ones(4), 4)
MATRICES = {
    "mean": Mean().matrix(INFO),
    "mean without b": restrict(Mean().matrix(INFO), PRESENT),
    "SoftPull": SoftPull(0.6).matrix(INFO),
    "SoftPull without b": restrict(SoftPull(0.6).matrix(INFO), PRESENT),
    "SoftPull, all alike": SoftPull(0.25).matrix(INFO),
    "general": GENERAL,
    "general without b": restrict(GENERAL, PRESENT),
    "a weight of nothing": np.tile([1 - 1e-14, 1e-14, 0.0, 0.0], (4, 1)),
    "one for all": np.tile([0.0, 0.0, 1.0, 0.0], (4, 1)),
}


@pytest.fixture(scope="module")
def key() -> ckks.Key:
    return ckks.Key.new()


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    """Four models' numbers, a block and a bit of them, as large as trained parameters are."""
    return np.random.default_rng(0).normal(0, 0.05, (4, ckks.VALUES + 3))


@pytest.fixture(scope="module")
def copies(key: ckks.Key, numbers: np.ndarray) -> list[list[bytes]]:
    return [key.encrypt(row) for row in numbers]


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_rows_are_the_weighted_sums(
    key: ckks.Key, numbers: np.ndarray, copies: list[list[bytes]], matrix: np.ndarray
) -> None:
    rows = ckks.weighted_rows(matrix, copies)
    for row, expected in zip(rows, matrix @ numbers, strict=True):
        assert row is not None and max(map(len, row)) <= ckks.LONGEST
        found = key.decrypt(row, numbers.shape[1])
        assert np.linalg.norm(found - expected) < 3e-7 * np.linalg.norm(expected)
        # Rescaling by another number than the scale would be seen here: as a slope, whatever the noise.
        assert abs(found @ expected / (expected @ expected) - 1) < 1e-7
        assert (found * 2**28 == np.round(found * 2**28)).all()


def test_a_row_that_nobody_else_weighs_may_be_missing(key: ckks.Key, copies: list[list[bytes]]) -> None:
    matrix = restrict(SoftPull(0.6).matrix(INFO), PRESENT)
    rows = ckks.weighted_rows(matrix, [copies[0], None, *copies[2:]])
    assert rows[1] is None and rows[0] is not None
    # What was weighed once is handed on, and never weighed again.
    assert ckks.weighted_rows(matrix, [copies[0], rows[0], *copies[2:]])[1] is rows[0]
    with pytest.raises(CodecError, match="not of the form"):
        ckks.weighted_rows(MATRICES["general"], [copies[0], rows[0], *copies[2:]])
    with pytest.raises(CodecError, match="0 and 2 ciphertexts cannot be summed up"):
        ckks.weighted_rows(MATRICES["general"], [copies[0], None, *copies[2:]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_what_cannot_be_encrypted(key: ckks.Key, bad: float) -> None:
    with pytest.raises(ValueError, match="finite and at most"):
        key.encrypt(np.array([0.0, bad]))
    edge = np.array([ckks.LARGEST, -ckks.LARGEST])
    (row, *_) = ckks.weighted_rows(np.full((2, 2), 0.5), [key.encrypt(edge), key.encrypt(edge)])
    assert row is not None and np.allclose(key.decrypt(row, 2), edge, rtol=1e-9)


def test_another_key_and_another_count(key: ckks.Key, copies: list[list[bytes]]) -> None:
    other = ckks.Key.new()
    assert other.fingerprint != key.fingerprint == ckks.Key(key.dump()).fingerprint
    with pytest.raises(CodecError, match="another key"):
        other.decrypt(copies[0], ckks.VALUES + 3)
    with pytest.raises(CodecError, match="expected 1 ciphertexts for 5 numbers, got 2"):
        key.decrypt(copies[0], 5)
    with pytest.raises(ValueError, match="no key"):
        ckks.Key(b"x" * 100)
    with pytest.raises(ValueError, match="no key"):
        ckks.Key(ckks._written(ckks._without_key(), secret=False))


def test_who_mixes_has_no_key(copies: list[list[bytes]]) -> None:
    context = ckks._without_key()
    assert not context.is_private() and not context.has_secret_key()
    with pytest.raises(ValueError, match="secret_key"):
        ckks._vector(context, copies[0][0], (2,)).decrypt()


def _framed(inner: bytes) -> bytes:
    size, count = b"", len(inner)
    while count >= 0x80:
        size, count = size + bytes([count & 0x7F | 0x80]), count >> 7
    return ckks._HEAD + size + bytes([count]) + inner + ckks._TAIL


def _seal(body: bytes, compression: int) -> bytes:
    return struct.pack("<HBBBBHQ", 0xA15E, 16, 4, 3, compression, 0, 16 + len(body)) + body


SIZES = st.sampled_from([0, 1, 2, 16, 8192, 2**31, 2**40, 2**63, 2**64 - 1])
HEADERS = st.tuples(*[SIZES] * 6).map(lambda sizes: b"\0" * 33 + struct.pack("<6Q", *sizes))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_malformed_bytes_are_refused(copies: list[list[bytes]], data: st.DataObject) -> None:
    """SEAL's own form too, with sizes that nobody has, compressed and not. What is taken, only a hospital can judge."""
    block = copies[0][0]
    start = len(ckks._HEAD) + 3 + 16
    kind = data.draw(st.sampled_from(["any", "cut", "framed", "headers", "changed"]))
    if kind == "any":
        block = data.draw(st.binary(max_size=200))
    elif kind == "cut":
        block = block[: data.draw(st.integers(0, len(block) - 1))]
    elif kind == "framed":
        block = _framed(_seal(data.draw(st.binary(max_size=300)), data.draw(st.integers(0, 3))))
    elif kind == "headers":
        block = _framed(_seal(data.draw(HEADERS) + data.draw(st.binary(max_size=100)), 0))
    else:
        place, changed = data.draw(st.integers(start, start + 120)), bytearray(block)
        changed[place] ^= data.draw(st.integers(1, 255))
        block = bytes(changed)
    try:
        ckks.check_block(block)
    except CodecError:
        return
    assert kind == "changed"


def test_what_is_no_fresh_ciphertext_of_this_form(key: ckks.Key, copies: list[list[bytes]]) -> None:
    ckks.check_block(copies[0][0])
    (weighted, *_) = ckks.weighted_rows(np.full((4, 4), 0.25), copies)
    assert weighted is not None
    with pytest.raises(CodecError, match="not of the form"):
        ckks.check_block(weighted[0])
    with pytest.raises(CodecError, match="at most"):
        ckks.check_block(copies[0][0] * 2)
    for wrong in (copies[0][0] + b"\0", b"", ckks._HEAD + ckks._TAIL):
        with pytest.raises(CodecError, match="its own length"):
            ckks.check_block(wrong)
