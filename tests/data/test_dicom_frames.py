# SPDX-License-Identifier: Apache-2.0
"""Enhanced (multi-frame) DICOM: the same volume as a series of the same slices, in the same place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dicom_frames import write_frames
from dicom_series import affine_of, write_series
from medpfl.core.errors import DataError
from medpfl.data.volumes.prepare import read_image

pytest.importorskip("highdicom", reason="needs the extra 'dicom'")
VALUES = np.random.default_rng(0).integers(-900, 1500, (7, 9, 5)).astype(np.int16)


@pytest.mark.parametrize("turn", [0.0, 0.3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_frames_are_the_slices_of_a_series(tmp_path: Path, turn: float, order: tuple[int, ...]) -> None:
    """Whatever the frames' order in the file; each has its own slope and intercept."""
    affine = affine_of(turn)
    rescale = [(1.0 + k, -10.0 * k) for k in range(5)]
    scaled = np.stack([VALUES[..., k] * a + b for k, (a, b) in enumerate(rescale)], axis=-1)
    series = write_series(tmp_path / "series", scaled, affine)
    file = write_frames(tmp_path / "frames" / "one.dcm", VALUES, affine, order, rescale)
    expected, place = read_image(series)
    for path in (file, file.parent):
        found, other = read_image(path)
        assert found.shape == expected.shape == (1, 7, 9, 5)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(other, place, atol=1e-4)


def group(number: int, name: str, **tags: Any) -> Callable[[Any], None]:
    def change(header: Any) -> None:
        item = getattr(header.PerFrameFunctionalGroupsSequence[number], name)[0]
        for tag, value in tags.items():
            setattr(item, tag, value)

    return change


def cine(header: Any) -> None:
    del header.PerFrameFunctionalGroupsSequence, header.SharedFunctionalGroupsSequence


def unplaced(header: Any) -> None:
    del header.PerFrameFunctionalGroupsSequence[3].PlanePositionSequence


def short(header: Any) -> None:
    header.PixelData = header.PixelData[:100]


def fewer(header: Any) -> None:
    header.PerFrameFunctionalGroupsSequence.pop()


def coloured(header: Any) -> None:
    header.SamplesPerPixel, header.PhotometricInterpretation, header.PlanarConfiguration = 3, "RGB", 0
    header.PixelData *= 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cine, "it has 5 frames, and nothing says where they lie"),
        (fewer, "it has 5 frames, and its functional groups are of 4"),
        (unplaced, "frame 4 lacks ImagePositionPatient in its functional groups"),
        (group(2, "PlanePositionSequence", ImagePositionPatient=[12, -20, -7.5]), "lie at one position"),
        (group(4, "PlanePositionSequence", ImagePositionPatient=[12, -20, 10.5]), "evenly spaced: 6 mm between two of"),
        (coloured, "expected grey frames, got RGB"),
        (short, "cannot be read as an image: it is damaged, incomplete or something else"),
    ],
)  # fmt: skip
def test_broken_frames_are_named(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    file = write_frames(tmp_path / "one.dcm", VALUES, affine_of(), change=change)
    with pytest.raises(DataError, match=words) as caught:
        read_image(file)
    assert str(caught.value).startswith(f"{file}: ") and str(file) not in caught.value.public


def test_a_volume_among_slices(tmp_path: Path) -> None:
    series = write_series(tmp_path / "series", VALUES, affine_of())
    write_frames(series / "zzz.dcm", VALUES, affine_of())
    with pytest.raises(DataError, match=r"zzz\.dcm: holds several frames, so it is a volume itself"):
        read_image(series)


@pytest.mark.parametrize("signed", [True, False])
def test_bits_beside_those_that_are_stored_do_not_count(tmp_path: Path, signed: bool) -> None:
    """They may hold an overlay, or zeros above a value below zero."""
    values = np.random.default_rng(0).integers(-900 if signed else 0, 1500, (4, 6, 5)).astype(np.int16)

    def stored_in_12_bits(header: Any) -> None:
        pixels = np.frombuffer(header.PixelData, "<u2") & 0x0FFF
        header.PixelData = (pixels if signed else pixels | 0x8000).astype("<u2").tobytes()
        header.BitsStored, header.HighBit, header.PixelRepresentation = 12, 11, int(signed)

    array, _ = read_image(write_frames(tmp_path / "frames.dcm", values, affine_of(), change=stored_in_12_bits))
    np.testing.assert_array_equal(array[0], values)
