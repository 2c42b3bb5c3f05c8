# SPDX-License-Identifier: Apache-2.0
"""Files that may have been made to do harm: how large what is in them may be, and YAML that multiplies itself."""

import math
import re
import zipfile
import zlib
from collections.abc import Hashable, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import yaml

from medpfl.core.errors import DataError

MOST_VALUES = 2**30
"""Values (voxels, samples) that one file, or one series of DICOM files, may hold; they are held in memory together."""
MOST_PREPARED = 2**27
"""Values that one prepared input may have, by a job's word: of its size, or of its voxel spacing."""
_LARGE, _RATIO = 2**28, 250
"""Bytes from which an array in an archive may not be more than so many times as large as it is compressed."""
_DEFLATED = 1032
"""Bytes that gzip makes of one at most."""
_LONGEST, _NODES = 2**22, 200_000
"""Bytes of a YAML file, and values in it, each counted wherever it is referred to."""
_TOO_MANY = f"it has more than {_NODES} values, each counted wherever it is referred to"

BROKEN_NPZ = (
    OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error, SyntaxError, TokenError,
)  # fmt: skip
"""What reading a damaged .npz file raises; numpy the last two, of an array's header."""

_LARGEST_KEY = 2**53
"""Larger numbers can be chosen so that Python takes hours to tell thousands of them apart as keys."""


def check_values(file: Path, shape: Sequence[int]) -> None:
    """Refuse a file before it is decoded, by the shape that its header names.

    Raises:
        DataError: it is too large.
    """
    if math.prod(int(length) for length in shape) > MOST_VALUES:
        raise DataError(f"{file}: holds {' x '.join(map(str, shape))} values; at most {MOST_VALUES} are read")


def check_held(file: Path, size: int, stored: int) -> None:
    """Refuse a volume before it is decoded whose header promises more than the file can hold, however it is compressed:
    readers make room for all of it first, 8 GB for a file of 69 bytes. Label maps, which are zeros but for a few
    voxels, may come near to the limit.

    Args:
        size: bytes of all voxels, as the header says.
        stored: bytes of the file.

    Raises:
        DataError: with what its header says.
    """
    if size > _DEFLATED * stored:
        raise DataError(f"{file}: its header promises voxels of {size} bytes, which {stored} bytes cannot hold")


def check_member(file: Path, member: zipfile.ZipInfo) -> None:
    """Refuse an archive's member that grows out of all proportion when it is decompressed.

    Raises:
        DataError: it does.
    """
    check_growth(file, member.filename, member.compress_size, member.file_size)


def check_growth(file: Path, name: str, packed: int, size: int) -> None:
    """Refuse what grows from ``packed`` bytes to ``size`` bytes, where that is much and out of all proportion.

    Raises:
        DataError: it does.
    """
    if size > _LARGE and size > _RATIO * max(packed, 1):
        raise DataError(
            f"{file}: '{name}' has {packed} bytes and would become {size}; more than {_RATIO} times as many are not "
            "read"
        )


class UniqueKeys(yaml.SafeLoader):
    """YAML would silently take the last of two equal keys, and has no limit of values."""

    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > _NODES:
            raise yaml.YAMLError(_TOO_MANY)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # of PyYAML, for !!int x or 2020-13-01
            what = repr(node.value[:40]) if isinstance(node, yaml.ScalarNode) else "this"
            told = f"{what} is no {node.tag.rpartition(':')[2]}" + (f": {error}" if type(error) is ValueError else "")
            raise yaml.constructor.ConstructorError(None, None, told, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):  # !!map [a]
            raise yaml.constructor.ConstructorError(None, None, "this is no map", node.start_mark)
        seen = set()
        for written, _ in node.value:
            key = self.construct_object(written, deep=True)
            if isinstance(key, int | float) and not abs(key) <= _LARGEST_KEY:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} is no label", written.start_mark)
            if not isinstance(key, Hashable) or key in seen:
                what = "is there twice" if isinstance(key, Hashable) else "is a list or a mapping"
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' {what}", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class Exponents(UniqueKeys):
    """1e-3 is a number, as in JSON and in YAML 1.2; by YAML 1.1, which PyYAML reads, it is text. Not for files with
    codes of diseases, some of which look like that."""


Exponents.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_yaml(path: Path, kind: type[UniqueKeys] = UniqueKeys) -> Any:
    """A YAML file's content: plain values only, no key twice, and references that do not multiply.

    Args:
        kind: how values are read.

    Raises:
        OSError: it cannot be read.
        yaml.YAMLError, ValueError, RecursionError: it is not valid, or too large.
    """
    with path.open("rb") as file:
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise yaml.YAMLError(f"it has more than {_LONGEST} bytes")
    loader = kind(content.decode("utf-8"))
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > _NODES:
            raise yaml.YAMLError(_TOO_MANY)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node, itself included. ``known``: node to what was counted; 0 while it is being counted."""
    if id(node) in known:
        if not known[id(node)]:
            raise yaml.YAMLError("it refers to itself")
        return known[id(node)]
    known[id(node)] = 0
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
    known[id(node)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(node)]
