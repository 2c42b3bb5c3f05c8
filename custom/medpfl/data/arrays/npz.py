# SPDX-License-Identifier: Apache-2.0
"""NumPy's .npz files, read in blocks of rows: an array larger than the memory is never held whole."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from medpfl.core.errors import DataError, unreadable
from medpfl.data.untrusted import BROKEN_NPZ, check_member

_BLOCK = 1 << 22  # bytes
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Npz:
    """An .npz file; nothing in it is unpickled.

    Raises:
        DataError: no such file, or no .npz.
    """

    def __init__(self, path: Path):
        self.path = path
        with self._open() as file:
            self.keys = [name.removesuffix(".npy") for name in file.namelist() if name.endswith(".npy")]

    def header(self, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of an array.

        Raises:
            DataError: there is no such array, it holds Python objects, or its header is broken.
        """
        with self._open() as file, self._member(file, key) as (_, shape, _, dtype):
            return shape, dtype

    def array(self, key: str) -> NDArray[Any]:
        """A whole (small) array: labels, groups."""
        with self._open() as file:
            return self._array(file, key)

    def headers(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of every array. Raises as ``header``."""
        found = {}
        with self._open() as file:  # once: to open it is to read the names of all
            for key in self.keys:
                with self._member(file, key) as (_, shape, _, dtype):
                    found[key] = shape, dtype
        return found

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All (small) arrays. Raises as ``blocks``."""
        with self._open() as file:
            return {key: self._array(file, key) for key in self.keys}

    def _array(self, file: zipfile.ZipFile, key: str) -> NDArray[Any]:
        with self._member(file, key) as (_, shape, _, dtype):
            none = np.zeros((0, *shape[1:]), dtype)
        return np.concatenate([none, *self._blocks(file, key)])

    def blocks(self, key: str) -> Iterator[NDArray[Any]]:
        """Some rows at a time, n x ... in the array's order.

        Raises:
            DataError: as ``header``, or the file ends too early.
        """
        with self._open() as file:
            yield from self._blocks(file, key)

    def _blocks(self, file: zipfile.ZipFile, key: str) -> Iterator[NDArray[Any]]:
        with self._member(file, key) as (stream, shape, fortran, dtype):
            size = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
            if fortran and len(shape) > 1:  # stored column by column, so it has no blocks of rows
                flat = np.frombuffer(self._take(stream, size * shape[0], key), dtype)
                yield flat.reshape(shape, order="F")
                return
            step = max(1, _BLOCK // max(size, 1))
            for start in range(0, shape[0], step):
                count = min(step, shape[0] - start)
                yield np.frombuffer(self._take(stream, size * count, key), dtype).reshape(count, *shape[1:])

    def _take(self, stream: IO[bytes], size: int, key: str) -> bytes:
        content = stream.read(size)
        if len(content) != size:
            raise DataError(f"{self.path}: array '{key}' ends too early: expected {size} bytes, got {len(content)}")
        return content

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as file:
                yield file
        except FileNotFoundError as error:
            raise DataError(f"{self.path}: no such file") from error
        except IsADirectoryError as error:
            raise DataError(f"{self.path} is a folder; name the file in it") from error
        except BROKEN_NPZ as error:
            raise DataError(unreadable(self.path, "an .npz file", error)) from error

    @contextmanager
    def _member(
        self, file: zipfile.ZipFile, key: str
    ) -> Iterator[tuple[IO[bytes], tuple[int, ...], bool, np.dtype[Any]]]:
        if f"{key}.npy" not in file.NameToInfo:
            raise DataError(f"{self.path}: there is no array '{key}'; the file has: {', '.join(self.keys)}")
        member = file.getinfo(f"{key}.npy")
        check_member(self.path, member)
        with file.open(member) as stream:
            version = npy.read_magic(stream)
            if version not in _HEADERS:
                raise DataError(f"{self.path}: array '{key}' has the unknown format version {version}")
            shape, fortran, dtype = _HEADERS[version](stream)
            if dtype.hasobject:
                raise DataError(f"{self.path}: array '{key}' holds Python objects, which are not read")
            if not shape:
                raise DataError(f"{self.path}: array '{key}' is a single value, expected one row a case")
            size = dtype.itemsize * math.prod(shape)
            if size > member.file_size:
                raise DataError(f"{self.path}: array '{key}' ends too early: its header says shape {shape}")
            if stream.tell() + size < member.file_size:  # so that its checksum, behind the last row, would not be seen
                raise DataError(f"{self.path}: array '{key}' holds more than its header says: shape {shape}")
            yield stream, shape, fortran, dtype
