# SPDX-License-Identifier: Apache-2.0
"""Volumes: real NIfTI files in, one orientation and spacing out, or one sentence."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.contract import Listing
from medpfl.data.declared import Problems, SplitRule
from medpfl.data.volumes.declare import VolumeCase, Volumes
from medpfl.data.volumes.prepare import prepare, prepare_label, read_image

SHAPE = (8, 10, 6)
VOXEL = (2.0, 2.0, 4.0)


def affine_of(voxel: tuple[float, float, float]) -> NDArray[np.float64]:
    affine = np.diag([*voxel, 1.0])
    affine[:3, 3] = [-7.0, -9.0, -10.0]
    return affine


def save(path: Path, values: NDArray[Any], affine: NDArray[np.float64] | None = None, axes: str = "RAS") -> Path:
    image = nib.Nifti1Image(values, affine_of(VOXEL) if affine is None else affine)
    if axes != "RAS":
        turn = nib.orientations.ornt_transform(
            nib.orientations.io_orientation(image.affine), nib.orientations.axcodes2ornt(axes)
        )
        image = image.as_reoriented(turn)
        assert "".join(nib.aff2axcodes(image.affine)) == axes
    nib.save(image, path)
    return path


def scan() -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return rng.normal(100, 20, SHAPE).astype(np.float32), (rng.random(SHAPE) < 0.3).astype(np.uint8)


@dataclass
class Volume:
    image: torch.Tensor
    label: torch.Tensor


def read(image: Path, label: Path, size: tuple[int, int] = SHAPE[:2], **others: Any) -> Volume:
    """A listed case as the segmentation task sees it."""
    dataset = Volumes(kind="volumes", datalist="-", labels={0: "background", 1: "organ"}, **others)
    item = dataset.read(VolumeCase("one", "one", "list", (image,), label))
    assert item.affine is not None and isinstance(item.target, np.ndarray)
    where = (item.affine, VOXEL, size)
    return Volume(prepare(item.image, *where), prepare_label(item.target, *where))


def list_cases(dataset: Volumes) -> Listing:
    return dataset.cases(Problems())


@pytest.mark.slow
def test_a_volume_is_read_as_it_was_written(tmp_path: Path) -> None:
    image, label = scan()
    volume = read(save(tmp_path / "i.nii.gz", image), save(tmp_path / "l.nii.gz", label))
    expected = (image - image.mean(dtype=np.float64)) / image.std(dtype=np.float64)
    np.testing.assert_allclose(volume.image[0].numpy(), expected, atol=1e-4)
    assert np.array_equal(volume.label.numpy(), label)
    assert volume.image.dtype == torch.float32 and volume.label.dtype == torch.uint8


@pytest.mark.parametrize("axes", ["LPS", "RSA", "PIR", "SAL"])
@pytest.mark.slow
def test_the_orientation_of_the_file_does_not_matter(tmp_path: Path, axes: str) -> None:
    image, label = scan()
    plain = read(save(tmp_path / "i.nii.gz", image), save(tmp_path / "l.nii.gz", label))
    turned = read(
        save(tmp_path / "ti.nii.gz", image, axes=axes), save(tmp_path / "tl.nii.gz", label, axes=axes)
    )  # fmt: skip
    torch.testing.assert_close(turned.image, plain.image, atol=1e-4, rtol=0)
    assert torch.equal(turned.label, plain.label)


def test_the_spacing_of_the_file_does_not_matter(tmp_path: Path) -> None:
    """A linear ramp is the same function at any voxel size, and linear interpolation meets it exactly."""
    volumes = []
    for name, voxel, shape, axes in (("a", VOXEL, (9, 9, 5), "RAS"), ("b", (1.0, 1.0, 2.0), (17, 17, 9), "PIR")):
        affine = affine_of(voxel)
        grid = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), axis=-1) @ affine[:3, :3]
        image = (grid @ np.array([1.0, 2.0, 3.0])).astype(np.float32)
        label = (grid[..., 0] >= 7.9).astype(np.uint8)
        paths = (save(tmp_path / f"{name}{i}.nii", v, affine, axes) for i, v in enumerate((image, label)))
        volumes.append(read(*paths, size=(9, 9)))
    torch.testing.assert_close(volumes[1].image, volumes[0].image, atol=1e-4, rtol=0)
    assert torch.equal(volumes[1].label, volumes[0].label)


def test_crop_and_pad_are_centred(tmp_path: Path) -> None:
    image, label = scan()
    paths = save(tmp_path / "i.nii", image), save(tmp_path / "l.nii", label)
    assert torch.equal(read(*paths, size=(4, 14)).label[:, 2:12], torch.from_numpy(label[2:6]))


def test_a_hospitals_own_coding(tmp_path: Path) -> None:
    image, label = scan()
    paths = save(tmp_path / "i.nii", image), save(tmp_path / "l.nii", label * np.uint8(255))
    assert np.array_equal(read(*paths, label_map={255: 1}).label.numpy(), label)
    both = label.astype(np.int16) * 255
    both[0, 0, 0] = 7
    save(tmp_path / "l.nii", both)
    with pytest.raises(DataError, match=r"l\.nii: label value 7 is not declared; expected 0 to 1 \(or 255 by lab"):
        read(*paths, label_map={255: 1})
    save(tmp_path / "l.nii", label * np.float32(1.0000001))  # as of a label map that was scaled
    with pytest.raises(DataError, match=r"label value 1\.0000001\d* is not declared; expected 0 to 1"):
        read(*paths)


def test_several_files_are_channels(tmp_path: Path) -> None:
    image, label = scan()
    save(tmp_path / "t1.nii", image), save(tmp_path / "t2.nii", image + 5), save(tmp_path / "l.nii", label)
    files = [{"image": ["t1.nii", "t2.nii"], "label": "l.nii"}] * 2
    dataset = datalist(tmp_path, {"training": files[:1], "test": [files[0] | {"patient": "other"}]})
    case = list_cases(dataset)["train"][0]
    np.testing.assert_array_equal(dataset.read(case).image, np.stack([image, image + 5]))  # type: ignore[arg-type]
    save(tmp_path / "t2.nii", image, shifted())
    with pytest.raises(DataError, match=r"t2\.nii: its geometry \(affine\) does not fit that of t1\.nii"):
        dataset.read(case)  # type: ignore[arg-type]
    save(tmp_path / "t2.nii", image[1:])
    with pytest.raises(DataError, match=r"t2\.nii: expected the shape of t1\.nii, \(8, 10, 6\), got \(7, 10, 6\)"):
        dataset.read(case)  # type: ignore[arg-type]


def shifted() -> NDArray[np.float64]:
    affine = affine_of(VOXEL)
    affine[0, 3] += 6
    return affine


def mirrored() -> NDArray[np.float64]:
    affine = affine_of(VOXEL)
    affine[0] = -affine[0]
    return affine


IMAGE, LABEL = scan()


def with_value(array: NDArray[Any], value: float) -> NDArray[np.float32]:
    changed = array.astype(np.float32)
    changed[3, 4, 2] = value
    return changed


@pytest.mark.parametrize(
    ("image", "label", "affine", "words"),
    [
        (IMAGE, LABEL[:, :, :5], None, ["l.nii", "shape (8, 10, 5)", "i.nii (8, 10, 6)"]),
        (IMAGE, np.stack([LABEL, LABEL], axis=-1), None, ["l.nii", "shape (8, 10, 6, 2)", "i.nii (8, 10, 6)"]),
        (IMAGE, with_value(LABEL, 2), None, ["l.nii", "label value 2 is not declared", "0 to 1"]),
        (IMAGE, with_value(LABEL, -1), None, ["l.nii", "label value -1"]),
        (IMAGE, with_value(LABEL, 0.5), None, ["l.nii", "label value 0.5"]),
        (IMAGE, with_value(LABEL, np.nan), None, ["l.nii", "label value nan"]),
        (IMAGE, with_value(LABEL, np.inf), None, ["l.nii", "label value inf"]),
        (with_value(IMAGE, np.nan), LABEL, None, ["i.nii", "not finite"]),
        (with_value(IMAGE, np.inf), LABEL, None, ["i.nii", "not finite"]),
        (IMAGE[:, :, 0], LABEL[:, :, 0], None, ["i.nii", "expected a volume with 3 axes, got 2"]),
        (IMAGE, LABEL, shifted(), ["l.nii", "geometry (affine)", "i.nii", "6 mm apart"]),
        (IMAGE, LABEL, mirrored(), ["l.nii", "geometry (affine)", "apart"]),
    ],
)
def test_one_sentence_names_the_file(
    tmp_path: Path, image: NDArray[Any], label: NDArray[Any], affine: NDArray[np.float64] | None, words: list[str]
) -> None:
    paths = save(tmp_path / "i.nii", image), save(tmp_path / "l.nii", label, affine)
    with pytest.raises(DataError) as caught:
        read(*paths)
    for word in [str(tmp_path), *words]:
        assert word in str(caught.value)
    assert str(tmp_path) not in caught.value.public


def test_rounding_in_a_header_is_no_mismatch(tmp_path: Path) -> None:
    image, label = scan()
    affine = affine_of(VOXEL)
    affine[:3, 3] += 0.01
    volume = read(save(tmp_path / "i.nii", image), save(tmp_path / "l.nii", label, affine))
    assert np.array_equal(volume.label.numpy(), label)


@pytest.mark.parametrize("pixdim", [(1.0, 1.0, 1.0), (2.0001, 2.0, 2.0)])
def test_the_sform_says_where_a_volume_lies_where_the_qform_is_not_set(tmp_path: Path, pixdim: Any) -> None:
    """MONAI takes the qform, which is no one's, as soon as ``pixdim`` is not the sform's voxel size."""
    affine = affine_of(VOXEL) @ np.diag([-1.0, -1.0, 1.0, 1.0])
    image = nib.Nifti1Image(scan()[0], affine)
    image.set_qform(None, 0)
    image.header["pixdim"][1:4] = pixdim
    nib.save(image, tmp_path / "i.nii")
    assert nib.load(tmp_path / "i.nii").header["pixdim"][1] == pytest.approx(pixdim[0])
    np.testing.assert_allclose(read_image(tmp_path / "i.nii")[1], affine, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        np.diag([1.0, 1.0, 1.0, 1.0]),  # another voxel size
        np.array([[0.0, -2.0, 0.0, 5.0], [2.0, 0.0, 0.0, 1.0], [0.0, 0.0, 4.0, 3.0], [0.0, 0.0, 0.0, 1.0]]),  # a turn
        np.diag([2.0, 2.0, 4.0, 1.0]),  # a shift
    ],
)
def test_the_sform_counts_where_the_qform_says_otherwise(tmp_path: Path, other: NDArray[np.float64]) -> None:
    """As in nibabel and viewers; MONAI takes the qform where the sform's voxel size is not that of ``pixdim``."""
    affine = affine_of(VOXEL)
    image = nib.Nifti1Image(scan()[0], affine)
    image.set_sform(affine, 1)
    image.set_qform(other, 1)
    nib.save(image, tmp_path / "i.nii")
    np.testing.assert_array_equal(read_image(tmp_path / "i.nii")[1], nib.load(tmp_path / "i.nii").affine)
    np.testing.assert_array_equal(nib.load(tmp_path / "i.nii").affine, affine)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    image, label = scan()
    good = save(tmp_path / "l.nii.gz", label)
    whole = save(tmp_path / "whole.nii.gz", image).read_bytes()
    for name, content in {"g.nii": b"garbage" * 99, "g.nii.gz": b"garbage" * 99, "cut.nii.gz": whole[:1500]}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            DataError, match=rf"{name}: cannot be read as an image: it is damaged, incomplete or something else"
        ):
            read(tmp_path / name, good)
    with pytest.raises(DataError, match=r"nowhere\.nii: no such file"):
        read(good, tmp_path / "nowhere.nii")


@pytest.mark.parametrize(("kind", "found"), [("<c8", "complex numbers"), ("u1, u1, u1", "colours")])
def test_voxels_that_are_no_real_numbers_are_refused(tmp_path: Path, kind: str, found: str) -> None:
    """Of complex numbers the imaginary parts were left out, with a warning at most."""
    names = {"names": ["R", "G", "B"], "formats": kind.split(", ")}
    array = np.zeros((4, 5, 6), names if "," in kind else kind)
    nib.save(nib.Nifti1Image(array, np.eye(4)), tmp_path / "i.nii")
    with pytest.raises(DataError, match=rf"i\.nii: expected one real number a voxel, got {found}"):
        read_image(tmp_path / "i.nii")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("sform", "2 x 2 x 0 mm (sform)"),
        ("sform, qform", "2 x 2 x 0 mm (sform)"),
        ("pixdim", "2 x 2 x 0 mm (pixdim)"),
        ("pixdim, sform", "2 x 2 x 0 mm (pixdim)"),
        ("nan, qform", "2 x 2 x nan mm (pixdim)"),
    ],
)
@pytest.mark.parametrize("of", ["i.nii", "l.nii.gz"])
def test_a_spacing_of_zero(tmp_path: Path, field: str, words: str, of: str) -> None:
    """``field``: what has it, and what else gives the geometry. The reader would put another in silence."""
    values = dict(zip(("i.nii", "l.nii.gz"), scan(), strict=True))
    paths = {name: save(tmp_path / name, array) for name, array in values.items()}
    flat = affine_of(VOXEL)
    flat[2, 2] = 0
    header = nib.Nifti1Image(values[of], affine_of(VOXEL)).header
    header.set_sform(flat if field.startswith("sform") else affine_of(VOXEL), code=int("sform" in field))
    header["qform_code"], header["vox_offset"] = int("qform" in field), 352
    if not field.startswith("sform"):
        header["pixdim"][3] = float("nan") if field.startswith("nan") else 0
    raw = header.binaryblock + b"\0" * 4 + values[of].tobytes("F")  # nibabel would mend the header
    paths[of].write_bytes(gzip.compress(raw) if of.endswith("gz") else raw)
    with pytest.raises(DataError) as caught:
        read(*paths.values())
    assert str(caught.value) == f"{paths[of]}: expected a voxel spacing above 0, its header has {words}"


def datalist(folder: Path, content: Any, **split: Any) -> Volumes:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "list.json").write_text(text)
    dataset = Volumes(
        kind="volumes",
        datalist="list.json",
        labels={0: "background", 1: "organ"},
        split=SplitRule(**({"group": "patient"} | split)),
    )
    dataset._folder = folder
    return dataset


def item(name: str, **others: Any) -> dict[str, Any]:
    return {"image": f"images/{name}.nii.gz", "label": f"labels/{name}.nii.gz"} | others


def test_lists_are_used_as_they_are(tmp_path: Path) -> None:
    cases = list_cases(datalist(tmp_path, {"training": [item("b"), item("a")], "test": [item("c")]}))
    assert [case.name for case in cases["train"]] == ["images/b", "images/a"]
    assert cases["train"][0].images == (tmp_path / "images" / "b.nii.gz",)
    assert cases["validation"] == [] and len(cases["test"]) == 1


def test_a_list_with_only_training_is_cut_by_patient(tmp_path: Path) -> None:
    items = [item(f"{patient}{visit}", patient=patient) for patient in range(10) for visit in "xy"]
    cases = list_cases(datalist(tmp_path, {"training": items}))
    assert {split: len(some) for split, some in cases.items()} == {"train": 12, "validation": 4, "test": 4}
    owners = [{case.group for case in some} for some in cases.values()]
    assert sum(map(len, owners)) == 10 and set.union(*owners) == {str(patient) for patient in range(10)}


@pytest.mark.parametrize("patient", [" ", float("nan")])
def test_items_whose_patient_is_empty_are_no_single_patient(tmp_path: Path, patient: Any) -> None:
    items = [item(str(number), patient=patient if number > 7 else number) for number in range(10)]
    problems = Problems(keep=True)
    datalist(tmp_path, {"training": items}).cases(problems)
    assert len(problems.found) == 2 and all("'patient' is empty; leave it out" in found for found in problems.found)


def test_lists_without_labels_are_left_out(tmp_path: Path) -> None:
    """The Decathlon's own dataset.json: the test images have no labels, so the training list is cut."""
    content = {
        "name": "Task09_Spleen", "labels": {"0": "background", "1": "spleen"}, "numTraining": 10, "numTest": 2,
        "training": [item(str(number)) for number in range(10)],
        "test": ["./imagesTs/spleen_1.nii.gz", "./imagesTs/spleen_7.nii.gz"],
    }  # fmt: skip
    cases = list_cases(datalist(tmp_path, content))
    assert [len(cases[split]) for split in ("train", "validation", "test")] == [6, 2, 2]
    assert cases["test"][0].where.endswith("list.json: training[" + cases["test"][0].name.removeprefix("images/") + "]")
    both = list_cases(datalist(tmp_path, {"training": [item("a")], "testing": [item("b"), {"image": "c"}]}))
    assert [case.name for case in both["test"]] == ["images/b"]
    lists = {"training": [item("a")], "test": ["./imagesTs/c.nii.gz"], "testing": [item("b")]}
    assert [case.name for case in list_cases(datalist(tmp_path, lists))["test"]] == ["images/b"]  # not cut from "a"


def test_a_field_can_name_the_split(tmp_path: Path) -> None:
    named = ["train", "val", "Training", "test", "validation"]
    items = [item(str(number), part=part) for number, part in enumerate(named)]
    dataset = datalist(tmp_path, {"training": items}, column="part")
    cases = list_cases(dataset)
    assert [[case.name[-1] for case in cases[s]] for s in cases] == [["0", "2"], ["1", "4"], ["3"]]
    items[1]["part"] = "hold-out"
    with pytest.raises(DataError, match=r"training\[1\]: 'part' must be train, validation or test, got 'hold-out'"):
        list_cases(datalist(tmp_path, {"training": items}, column="part"))


def test_every_problem_is_kept_when_asked(tmp_path: Path) -> None:
    content = {"training": [item("a"), 5, {"image": "b"}], "test": [item("c"), item("a")]}
    problems = Problems(keep=True)
    cases = datalist(tmp_path, content).cases(problems)
    assert [len(problems.found), len(cases["train"]), len(cases["test"])] == [3, 1, 2]
    assert [
        "training[1]" in problems.found[0],
        "training[2]" in problems.found[1],
        "'images/a' is in" in problems.found[2],
    ]


def test_equal_file_names_in_folders_of_their_own_are_different_patients(tmp_path: Path) -> None:
    items = [{"image": f"p{n}/t1.nii.gz", "label": f"p{n}/seg.nii.gz"} for n in range(5)]
    assert sum(map(len, list_cases(datalist(tmp_path, {"training": items})).values())) == 5
    cases = list_cases(datalist(tmp_path, {"training": items[:3], "test": items[3:]}))
    assert [case.name for case in cases["test"]] == ["p3/t1", "p4/t1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["list.json: not valid JSON"]),
        ("[" * 100_000, ["list.json: not valid JSON"]),
        ([], ["list.json: expected a Decathlon datalist", "'training'"]),
        ({"test": [item("a")]}, ["expected a Decathlon datalist", "'training'"]),
        ({"training": [{"label": "a"}], "test": []}, ["list.json: training[0]", "'image': file", "{'label': 'a'}"]),
        ({"training": [item("a"), "b"]}, ["training[1]", "got 'b'"]),
        ({"training": [item("a")], "test": [{"image": 5, "label": "b"}]}, ["test[0]", "'image': 5"]),
        ({"training": [{"image": "a"}]}, ["training[0]", "'label' is missing"]),
        ({"training": [item("a")], "test": 5}, ["'test' must be a list", "got 5"]),
        ({"training": [item("a")], "validation": [item("b")]}, ["list.json: the test split is empty"]),
        ({"training": [], "test": [item("b")]}, ["list.json: the train split is empty"]),
        ({"training": []}, ["list.json", "0 groups cannot be cut"]),
        ({"training": [item("a")], "test": [item("a")]}, ["'images/a' is in the train split and in the test split"]),
        (
            {"training": [item("a", patient=7)], "validation": [item("b", patient=7)], "test": [item("c")]},
            ["'7' is in the train split and in the validation split"],
        ),
    ],
)
def test_one_sentence_about_the_list(tmp_path: Path, content: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        list_cases(datalist(tmp_path, content))
    for word in words:
        assert word in str(caught.value)


def test_no_list(tmp_path: Path) -> None:
    dataset = datalist(tmp_path, "{}")
    (tmp_path / "list.json").unlink()
    with pytest.raises(DataError, match=r"cannot read the datalist .*list\.json: No such file"):
        list_cases(dataset)
