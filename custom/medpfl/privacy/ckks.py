# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of encrypted numbers: CKKS by Microsoft SEAL, as TenSEAL offers it.

Cheon, Kim, Kim, Song, "Homomorphic Encryption for Arithmetic of Approximate Numbers", ASIACRYPT 2017. Whoever has the
``Key`` encrypts and decrypts; who has none can add and weigh (``weighted_rows``), and learns nothing. Encryption is
symmetric: adding and weighing need no public, relinearisation or Galois keys, and so the server gets none.

A block is one ciphertext of ``VALUES`` numbers, the last one filled up with zeros. One multiplication by a plain weight
and its rescaling are all the depth there is: a fresh block has two moduli (100 bits), a weighted one has one (60 bits).
All moduli together have 140 bits at degree 8192, where the HomomorphicEncryption.org standard (2018) allows 218 for 128
bits of security; SEAL itself refuses more.
"""

import hashlib
import hmac
import math
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import CodecError, ConfigError
from medpfl.core.mixing import Matrix, check_matrix, diagonal_and_shared

DEGREE = 8192
MODULI = (60, 40, 40)
"""Bits: what a weighted block keeps, what rescaling takes away, and SEAL's own for keys, which here nothing uses."""
SCALE = 1099510890497.0
"""Of the numbers: the second modulus, a prime near 2^40, and not 2^40 itself. Rescaling divides by it, which TenSEAL
takes for the scale; with 2^40 every weighted sum would come out too large by 6.7e-7."""
VALUES = DEGREE // 2
LARGEST = 2.0**18
"""No number may be larger in magnitude: half the first modulus is about 2^19 times the scale."""
LONGEST = 2 * 2 * DEGREE * 8 + 2048
"""Bytes of a block, at most: two polynomials with two moduli, and what stands around them."""
_GRID = 2.0**28
_WEIGHS_NOTHING = 2.0**-40
"""A weight below this is zero at the scale, and SEAL would have to make an encryption of zero, which needs a key."""
_FRESH, _WEIGHTED = 2, 1
_REFUSED = (RuntimeError, ValueError, OverflowError)  # what TenSEAL makes of SEAL's exceptions

Values = NDArray[np.float64]


def _tenseal() -> Any:
    try:
        import tenseal
    except ImportError as error:
        raise ConfigError("the job encrypts models, which needs TenSEAL here: pip install 'medpfl[privacy]'") from error
    return tenseal


def _new_context() -> Any:
    tenseal = _tenseal()
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        DEGREE,
        coeff_mod_bit_sizes=list(MODULI),
        encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
        n_threads=1,
    )
    context.global_scale = SCALE
    return context


def _written(context: Any, secret: bool) -> bytes:
    written: bytes = context.serialize(
        save_public_key=False, save_secret_key=secret, save_galois_keys=False, save_relin_keys=False
    )
    return written


@cache
def _without_key() -> Any:
    """Parameters only; what SEAL made with them is dropped."""
    context = _tenseal().context_from(_written(_new_context(), secret=False), 1)
    if context.is_private():
        raise AssertionError("a context for who has no key holds one")
    return context


class Key:
    """The secret that all hospitals of a federation share.

    Args:
        written: as ``dump`` gives it.

    Raises:
        ValueError: it is no key of these parameters.
    """

    def __init__(self, written: bytes):
        self._written = written
        try:
            self._context = _tenseal().context_from(written, 1)
            private, scale = self._context.is_private(), self._context.global_scale
            self.decrypt(self.encrypt(np.ones(1)), 1)
        except (*_REFUSED, CodecError) as error:
            raise ValueError(f"it is no key of CKKS of degree {DEGREE}") from error
        if not private or scale != SCALE:
            raise ValueError("it holds no secret key of these parameters")

    @classmethod
    def new(cls) -> "Key":
        """A key that nobody has had."""
        return cls(_written(_new_context(), secret=True))

    def dump(self) -> bytes:
        """The key as bytes; whoever has them can decrypt."""
        return self._written

    @property
    def fingerprint(self) -> str:
        """Sixteen characters that tell two keys apart, and nothing of the key."""
        return hashlib.sha256(b"medpfl key " + self._written).hexdigest()[:16]

    def mark(self, text: str) -> str:
        """HMAC-SHA256, by which those who have the key can compare texts through somebody who has not."""
        return hmac.new(self._written, text.encode(), hashlib.sha256).hexdigest()

    def encrypt(self, values: Values) -> list[bytes]:
        """The numbers in blocks.

        Args:
            values: d finite numbers of at most ``LARGEST`` in magnitude.

        Raises:
            ValueError: one is not.
        """
        if values.size and not np.abs(values).max() <= LARGEST:  # NaN is not
            raise ValueError(f"not all numbers are finite and at most {LARGEST:g} in magnitude")
        tenseal, blocks = _tenseal(), []
        for start in range(0, values.size, VALUES):
            block = np.zeros(VALUES)
            part = values[start : start + VALUES]
            block[: part.size] = part
            blocks.append(bytes(tenseal.ckks_vector(self._context, block.tolist()).serialize()))
        return blocks

    def decrypt(self, blocks: Sequence[bytes], size: int) -> Values:
        """The first ``size`` numbers, each rounded to a multiple of 2^-28.

        Rounding takes away the last bits, in which CKKS leaves its noise: to whoever holds a ciphertext and learns what
        it decrypts to with all its bits, they tell the key (Li, Micciancio, "On the Security of Homomorphic Encryption
        on Approximate Numbers", EUROCRYPT 2021).

        Raises:
            CodecError: there are not as many blocks, one is malformed, or the numbers are beyond ``LARGEST``, as they
                are when another key encrypted them.
        """
        if len(blocks) != count_of(size):
            raise CodecError(f"expected {count_of(size)} ciphertexts for {size} numbers, got {len(blocks)}")
        found = np.zeros(len(blocks) * VALUES)
        for index, block in enumerate(blocks):
            vector = _vector(self._context, block, (_FRESH, _WEIGHTED))
            try:
                found[index * VALUES : (index + 1) * VALUES] = vector.decrypt()
            except _REFUSED as error:
                raise CodecError(f"a ciphertext cannot be decrypted: {_short(error)}") from error
        if found.size and not np.abs(found).max() <= LARGEST + 1:
            raise CodecError(
                "what it decrypts to is no model: it was encrypted with another key, or changed on the way"
            )
        return np.asarray(np.round(found[:size] * _GRID) / _GRID)


def count_of(size: int) -> int:
    """Blocks of so many numbers."""
    return math.ceil(size / VALUES)


def check_block(block: bytes) -> None:
    """Refuse what is no fresh ciphertext of these parameters; whose key made it cannot be seen.

    Raises:
        CodecError: it is none.
    """
    _vector(_without_key(), block, (_FRESH,))


def weighted_rows(matrix: Matrix, copies: Sequence[Sequence[bytes] | None]) -> list[Sequence[bytes] | None]:
    """Row i is the sum over j of matrix[i, j] times copy j, block by block, as ciphertexts.

    A row of a single 1 hands on that copy as it is, None included.

    Args:
        matrix: K x K, row-stochastic.
        copies: K times the blocks of one slot, fresh and checked; None: there is none, and no other row weighs it.

    Raises:
        CodecError: they cannot be summed up.
        ValueError: the matrix is not row-stochastic.
    """
    check_matrix(matrix)
    weights = np.where(np.abs(matrix) < _WEIGHS_NOTHING, 0.0, matrix)
    handed = [int(row.argmax()) if (row != 0).sum() == 1 and row.max() == 1.0 else None for row in weights]
    made_by = [next(i for i, other in enumerate(weights) if (other == row).all()) for row in weights]
    found: dict[int, list[bytes]] = {row: [] for row in made_by if handed[row] is None}
    if found:
        weighed = {j: blocks or () for j, blocks in enumerate(copies) if weights[list(found), j].any()}
        lengths = sorted({len(blocks) for blocks in weighed.values()})
        if len(lengths) != 1:
            raise CodecError(f"copies of {' and '.join(map(str, lengths))} ciphertexts cannot be summed up")
        for block in range(lengths[0]):
            vectors = {j: _vector(_without_key(), blocks[block], (_FRESH,)) for j, blocks in weighed.items()}
            try:
                for row, total in _weighted(weights, vectors, list(found)).items():
                    found[row].append(bytes(total.serialize()))
            except _REFUSED as error:
                raise CodecError(f"ciphertexts cannot be summed up: {_short(error)}") from error
    return [found[row] if one is None else copies[one] for one, row in zip(handed, made_by, strict=True)]


def _weighted(weights: Matrix, vectors: Mapping[int, Any], rows: Sequence[int]) -> dict[int, Any]:
    """Row to its sum. Where the rows differ on the diagonal only (SoftPull), their common sum is made once."""

    def summed(row: Sequence[float]) -> Any:
        total = None
        for j, weight in enumerate(row):
            if weight:
                term = vectors[j] * float(weight)
                total = term if total is None else total + term
        return total

    keep, shared = diagonal_and_shared(weights)
    if keep is None or len(rows) == 1 or not all(shared):
        return {row: summed(weights[row].tolist()) for row in rows}
    common = summed(shared)
    own = {row: keep[row] if abs(keep[row]) >= _WEIGHS_NOTHING else None for row in rows}
    return {row: common + vectors[row] * weight if weight else common for row, weight in own.items()}


def _vector(context: Any, block: bytes, levels: Sequence[int]) -> Any:
    """One block as TenSEAL's vector, with exactly one ciphertext in it, of full length and in the form that sums need.

    The sizes are looked at before TenSEAL is: its container is a protobuf message of a length, a ciphertext that says
    its size itself, and a scale.

    Raises:
        CodecError: it is none.
    """
    _check_container(block)
    try:
        vector = _tenseal().ckks_vector_from(context, block)
        (inner,) = vector.ciphertext()
        right = inner.size() == 2 and inner.coeff_modulus_size() in levels and inner.is_ntt_form()
        if not right or inner.is_transparent() or inner.scale != SCALE:
            raise CodecError("a ciphertext is not of the form that this job's are")
    except _REFUSED as error:
        raise CodecError(f"a ciphertext is malformed: {_short(error)}") from error
    return vector


_HEAD = b"\x0a\x02" + bytes([VALUES & 0x7F | 0x80, VALUES >> 7]) + b"\x12"
"""Field 1, packed: the one length, ``VALUES``; then field 2."""
_TAIL = b"\x19" + struct.pack("<d", SCALE)
"""Field 3: the scale."""
_SEAL = struct.Struct("<HBBBBHQ")
"""SEAL's header: magic, its own length, version (two bytes), compression, reserved, size of the whole."""
_MAGIC = 0xA15E


def _check_container(block: bytes) -> None:
    if len(block) > LONGEST:
        raise CodecError(f"a ciphertext has at most {LONGEST} bytes, got {len(block)}")
    length, place = 0, len(_HEAD)
    for shift in (0, 7, 14, 21):
        byte = block[place] if place < len(block) else 0
        length |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            break
    inner = block[place : len(block) - len(_TAIL)]
    framed = block.startswith(_HEAD) and block.endswith(_TAIL) and len(inner) == length >= _SEAL.size
    if not framed or (_SEAL.unpack_from(inner)[0], _SEAL.unpack_from(inner)[-1]) != (_MAGIC, length):
        raise CodecError("a ciphertext is malformed: it does not say its own length")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
