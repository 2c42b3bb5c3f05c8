# SPDX-License-Identifier: Apache-2.0
"""Whether compressed voxels are as they were written. Readers stop once they have what they need, and so before the
checksum, which stands at the end: of a file that a disk or a transfer has damaged they give other voxels."""

import re
import zlib
from pathlib import Path

_PIECE = 2**20
_GZIP = b"\x1f\x8b"
_MORE = 2**20
"""Bytes beside the voxels: a header, and what a writer puts behind them."""
_START = {
    ".nrrd": (re.compile(rb"^encoding:[ \t]*(gzip|gz)\s*$", re.IGNORECASE | re.MULTILINE), rb"\r?\n\r?\n"),
    ".mha": (re.compile(rb"^CompressedData[ \t]*=[ \t]*True\s*$", re.MULTILINE), rb"ElementDataFile[^\n]*\n"),
}
"""Of files with a header of text: what says in it that the voxels are compressed, and what stands before them."""


def check_sum(file: Path, size: int) -> None:
    """Decompress the voxels of a file to their end; what is not compressed has no checksum.

    Args:
        size: bytes of the voxels, as the header says.

    Raises:
        zlib.error, EOFError: they are damaged, or end before their checksum.
    """
    with file.open("rb") as opened:
        packed = opened.read(_PIECE)
        if marks := _START.get(file.suffix.lower()):
            end = re.search(marks[1], packed)
            if not end or not marks[0].search(packed[: end.end()]):
                return
            packed = packed[end.end() :] or opened.read(_PIECE)
        elif not packed.startswith(_GZIP):
            return
        stream, left = zlib.decompressobj(zlib.MAX_WBITS | 32), size + _MORE
        while packed:
            left -= len(stream.decompress(packed, _PIECE))
            if left < 0:
                return  # it holds more than is read of it, perhaps without an end
            packed = stream.unconsumed_tail
            if stream.eof:  # another part may follow, which belongs to it
                packed = stream.unused_data or opened.read(_PIECE)
                if not packed.startswith(_GZIP):
                    return
                stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
            packed = packed or opened.read(_PIECE)
        stream.flush()
        if not stream.eof:
            raise EOFError("it ends before its checksum")
