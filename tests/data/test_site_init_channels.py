# SPDX-License-Identifier: Apache-2.0
"""Several images of a case are channels in the order of their names, which must say the same for every case."""

from pathlib import Path

import pytest

from medpfl.core.errors import DataError
from medpfl.data.init.volumes import find_pairs


def made(folder: Path, *names: str) -> Path:
    for name in names:
        file = folder / f"{name}.nii.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (("p{0}/p{0}_flair", "p{0}/p{0}_t1", "p{0}/p{0}_t1ce", "p{0}/p{0}_seg"), "p1_flair p1_t1 p1_t1ce"),
        (("p{0}/flair_{0}", "p{0}/t1_{0}", "p{0}/mask"), "flair_1 t1_1"),
        (("p{0}/t1", "p{0}/t1ce", "p{0}/mask"), "t1 t1ce"),
        (("imagesTr/s{0}_0000", "imagesTr/s{0}_0001", "labelsTr/s{0}"), "s1_0000 s1_0001"),
        (("imagesTr/s{0}", "labelsTr/s{0}"), "s1"),
    ],
)
def test_names_that_say_the_same(names: tuple[str, ...], first: str, tmp_path: Path) -> None:
    for number in (1, 2, 12):
        made(tmp_path, *(name.format(number) for name in names))
    pairs = find_pairs(tmp_path)
    assert len(pairs) == 3 and " ".join(image.name.removesuffix(".nii.gz") for image in pairs[0].images) == first


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            ("p1/3_T1", "p1/5_T2", "p1/mask"),
            ("p2/4_T2", "p2/6_T1", "p2/mask"),
            r"p2: by their names, 4_T2\.nii\.gz, 6_T1\.nii\.gz are not the same channels .* as 3_T1\.nii\.gz, 5_T2",
        ),
        (("p1/T1", "p1/flair", "p1/mask"), ("p2/flair", "p2/t1", "p2/mask"), "give a channel the same name"),
        (
            ("imagesTr/s1_0000", "imagesTr/s1_0001", "labelsTr/s1"),
            ("imagesTr/s2_0000", "imagesTr/s2_0002", "labelsTr/s2"),
            "or name one datalist instead",
        ),
    ],
    ids=["series numbers", "capitals", "a missing channel"],
)
def test_channels_that_would_be_exchanged(
    one: tuple[str, ...], other: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        find_pairs(made(tmp_path, *one, *other))


def test_test_images_without_label_maps_are_left_out(tmp_path: Path) -> None:
    """As nnU-Net's folders have them; where some have a label map, one is missing."""
    made(tmp_path, *(f"{kind}/s{number}" for kind in ("imagesTr", "labelsTr") for number in (1, 2)), "imagesTs/s3")
    assert [pair.label.name for pair in find_pairs(tmp_path)] == ["s1.nii.gz", "s2.nii.gz"]
    made(tmp_path, "imagesTs/s4", "labelsTs/s4")
    with pytest.raises(DataError, match=r"s3\.nii\.gz: found no label map of the same name"):
        find_pairs(tmp_path)
