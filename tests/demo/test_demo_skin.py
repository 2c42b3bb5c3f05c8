# SPDX-License-Identifier: Apache-2.0
"""The skin demo: generated images in HAM10000's layout, and a few of the real ones where they are."""

import csv
import os
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from medpfl.bundle import prepare_demo
from medpfl.cli import app
from medpfl.compare.data import reader
from medpfl.core.errors import DataError
from medpfl.data.declared import Problems
from medpfl.data.images.declare import ImageCase, Images
from medpfl.data.site_file import load_site_file
from medpfl.demo.skin import DIAGNOSES, ENVIRONMENT_VARIABLE, FOLDS, MALIGNANT, SITES, write_skin
from medpfl.models.unet import UNet
from medpfl.tasks import Classification, Segmentation

pytestmark = pytest.mark.slow  # its images take seconds to make

SOURCES = tuple(SITES["sources"])
EACH = 26  # images a source: two of each lesion, and one lesion that is in two sources


def write_archive(folder: Path) -> None:
    rng = np.random.default_rng(0)
    (folder / "part_1").mkdir(parents=True)
    (folder / "masks").mkdir()
    lines = ["lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"]
    lines += ["", "HAM_1,ISIC_other.jpg,nv,histo,80.0,male,scalp"]  # as in the published table's later rows
    for number, source in enumerate(SOURCES):
        for image in range(EACH):
            name, lesion = f"ISIC_{number}{image:03d}", f"HAM_{number}{image // 2:03d}"
            if image < 2 and number < 2:
                lesion = "HAM_both"
            diagnosis = "nv" if image < 16 else DIAGNOSES[image // 2 - 8]
            lines.append(f"{lesion},{name}.jpg,{diagnosis},histo,80.0,male,scalp,{source}")
            picture = rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(picture).save(folder / "part_1" / f"{name}.jpg")
            mask = np.zeros((60, 80), np.uint8)
            mask[: 10 + image] = 255
            Image.fromarray(mask).save(folder / "masks" / f"{name}_segmentation.png")
    (folder / "HAM10000_metadata.csv").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ham") / "unpacked"
    write_archive(folder)
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w") as file:
        for path in folder.rglob("*.*"):
            file.write(path, path.relative_to(folder))
    return folder


def cases(folder: Path, site: str, dataset: str) -> dict[str, list[ImageCase]]:
    listing = load_site_file(folder / f"{site}.yaml", site).dataset(dataset, Images).cases(Problems())
    return {split: list(found) for split, found in listing.items()}


def test_four_sources_three_tasks_one_split(archive: Path, tmp_path: Path) -> None:
    assert write_skin(tmp_path, archive.with_suffix(".zip")) == list(SOURCES)
    part: dict[str, str] = {}
    for site in SOURCES:
        found = {name: cases(tmp_path, site, f"skin_{name}") for name in ("diagnosis", "malignant", "lesion")}
        names = {
            name: {split: [case.name for case in each] for split, each in of.items()} for name, of in found.items()
        }
        assert names["diagnosis"] == names["malignant"] == names["lesion"]
        assert sum(map(len, names["lesion"].values())) == EACH
        for split, each in found["diagnosis"].items():
            for case, malignant in zip(each, found["malignant"][split], strict=True):
                assert part.setdefault(case.group, split) == split  # at all sites together
                assert malignant.label == (DIAGNOSES[case.label] in MALIGNANT)
        share = Counter({split: len(each) for split, each in found["diagnosis"].items()})
        assert share["train"] > share["test"] >= share["validation"] > 0


def test_copies_are_small_and_masks_stay_masks(archive: Path, tmp_path: Path) -> None:
    write_skin(tmp_path, archive, size=(20, 16))
    site_file = load_site_file(tmp_path / "rosendahl.yaml")
    assert {Image.open(path).size for path in tmp_path.glob("rosendahl/*/*.png")} == {(20, 16)}
    data = Segmentation("skin_lesion", size=(16, 20), architecture=UNet((4, 8))).load(site_file)
    for samples in data.splits.values():
        for name, mask in zip(samples.names, samples.targets[:], strict=True):
            rows = 10 + int(Path(name).stem[-3:])
            assert mask.float().mean().item() == pytest.approx(rows / 60, abs=0.032)


@pytest.mark.parametrize("size", [(20, 16), None])
def test_a_mask_whose_palette_begins_with_white_shows_the_same_lesion(
    archive: Path, tmp_path: Path, size: tuple[int, int] | None
) -> None:
    """As Pillow's ``quantize`` saves them, and as 402 of 10,015 masks of the copy that studies ran on."""
    shutil.copytree(archive, tmp_path / "palettes")
    for path in sorted((tmp_path / "palettes" / "masks").glob("*.png"))[::2]:
        grey = Image.open(path)
        palette = Image.fromarray(255 - np.asarray(grey)).convert("P")
        palette.putpalette([value for index in range(256) for value in (255 - index,) * 3])
        assert (np.asarray(palette.convert("L")) == np.asarray(grey)).all()
        palette.save(path)
    write_skin(tmp_path / "sites", tmp_path / "palettes", size=size)
    write_skin(tmp_path / "grey", archive, size=size)
    task = Segmentation("skin_lesion", size=(16, 20), architecture=UNet((4, 8)))
    found, right = (task.load(load_site_file(tmp_path / name / "rosendahl.yaml")) for name in ("sites", "grey"))
    for split, samples in right.splits.items():
        assert (found.splits[split].targets[:] == samples.targets[:]).all()


def test_the_files_as_they_are(archive: Path, tmp_path: Path) -> None:
    """Linked to a folder, taken out of an archive: the same bytes; small copies give nearly the same."""
    for name, data in (("folder", archive), ("zip", archive.with_suffix(".zip"))):
        write_skin(tmp_path / name, data, size=None)
        stored = sorted((tmp_path / name / "vienna_dias").glob("*/ISIC*"))
        assert len(stored) == 2 * EACH
        for path in stored:
            original = archive / ("masks" if path.suffix == ".png" else "part_1") / path.name
            assert path.read_bytes() == original.read_bytes()
            assert path.is_symlink() == (name == "folder")
    write_skin(tmp_path / "small", archive, size=(20, 16))
    task = Classification("skin_diagnosis", size=(16, 20))
    original, small = (
        task.load(load_site_file(tmp_path / name / "rosendahl.yaml")).splits["train"].inputs[:]
        for name in ("folder", "small")
    )
    assert (original - small).abs().max() < 3 * 4 / 255  # rounded to whole numbers on the way, once an axis


def test_two_hospitals_pool_vienna_and_a_lesion_keeps_its_split(archive: Path, tmp_path: Path) -> None:
    assert write_skin(tmp_path / "four", archive) == list(SOURCES)
    assert write_skin(tmp_path / "two", archive, "hospitals") == ["rosendahl", "vidir"]
    four = {
        case.path.stem: split
        for site in SOURCES
        for split, each in cases(tmp_path / "four", site, "skin_lesion").items()
        for case in each
    }
    two = {
        case.path.stem: split
        for site in SITES["hospitals"]
        for split, each in cases(tmp_path / "two", site, "skin_lesion").items()
        for case in each
    }
    assert two == four and len(four) == 4 * EACH


def lesions(folder: Path, site: str, dataset: str = "skin_malignant") -> dict[str, set[str]]:
    found = cases(folder, site, dataset)
    return {split: {case.group for case in each} for split, each in found.items()}


def test_five_folds(archive: Path, tmp_path: Path) -> None:
    tested: Counter[str] = Counter()
    for fold in range(FOLDS):
        write_skin(tmp_path / str(fold), archive, size=(8, 6), fold=fold)
        for site in SOURCES:
            found = lesions(tmp_path / str(fold), site)
            tested.update(found["test"])
            assert found["train"] and found["validation"] and not found["train"] & found["test"]
    everything = Counter(
        lesion for site in SOURCES for lesion in set[str]().union(*lesions(tmp_path / "0", site).values())
    )
    assert tested == everything


def test_a_comparison_takes_the_folds_of_one_folder(archive: Path, tmp_path: Path) -> None:
    write_skin(tmp_path / "0", archive, size=(8, 6))
    for fold in range(FOLDS):
        write_skin(tmp_path / str(fold), archive, size=(8, 6), fold=fold)
        for site in SOURCES:
            declared = reader(fold)(tmp_path / "0" / f"{site}.yaml", site).dataset("skin_malignant", Images)
            listing = declared.cases(Problems())
            found = {split: {case.group for case in each} for split, each in listing.items()}
            assert found == lesions(tmp_path / str(fold), site)
    with pytest.raises(DataError, match=r"rosendahl\.yaml: dataset 'skin_diagnosis' has 5 folds.*got split 5"):
        reader(5)(tmp_path / "0" / "rosendahl.yaml", "rosendahl")


def test_sources_divided_among_many_sites(archive: Path, tmp_path: Path) -> None:
    write_skin(tmp_path / "whole", archive, size=(8, 6))
    names = write_skin(tmp_path / "parts", archive, size=(8, 6), parts=3)
    assert names == [f"{site}_{number}" for site in SOURCES for number in (1, 2, 3)]
    assert sorted(path.stem for path in (tmp_path / "parts").glob("*.yaml")) == sorted(names)
    for site in SOURCES:
        whole = lesions(tmp_path / "whole", site)
        found = [lesions(tmp_path / "parts", f"{site}_{number}") for number in (1, 2, 3)]
        assert all(one["test"] == whole["test"] for one in found)
        for split in ("train", "validation"):
            dealt = [one[split] for one in found]
            assert set[str]().union(*dealt) == whole[split] and sum(map(len, dealt)) == len(whole[split])
        sizes = [len(one["train"]) for one in found]
        assert max(sizes) - min(sizes) <= 1


def test_few_images_of_rare_diagnoses_first_and_a_public_part(archive: Path, tmp_path: Path) -> None:
    assert write_skin(tmp_path, archive, size=(8, 6), images=16, public=10) == list(SOURCES)
    public = lesions(tmp_path, SOURCES[0], "skin_malignant_public")
    outside = set[str]().union(*public.values())
    assert 8 <= len(list(tmp_path.glob("public/images/*.png"))) <= 10
    for site in SOURCES:
        assert lesions(tmp_path, site, "skin_malignant_public") == public
        found = cases(tmp_path, site, "skin_diagnosis")
        kept = [case for each in found.values() for case in each]
        assert len(kept) <= 16 and not outside & {case.group for case in kept}
        # Of six diagnoses there is one lesion each, of "nv" there are many: the rare ones are all there.
        labels = Counter(case.label for case in kept)
        rare = {label: count for label, count in labels.items() if DIAGNOSES[label] != "nv"}
        assert set(rare.values()) <= {2} and labels[DIAGNOSES.index("nv")] == 16 - sum(rare.values())


def test_four_resolutions_of_the_same_images(archive: Path, tmp_path: Path) -> None:
    names = write_skin(tmp_path, archive, "resolutions", size=(16, 12), images=90)
    assert names == ["full", "half", "quarter", "eighth"]
    splits = [{split: sorted(found) for split, found in lesions(tmp_path, site).items()} for site in names]
    assert splits == splits[:1] * 4
    for site, width in zip(names, (16, 8, 4, 2), strict=True):
        assert {Image.open(path).width for path in tmp_path.glob(f"{site}/images/*.png")} == {width}
        assert {Image.open(path).width for path in tmp_path.glob(f"{site}/masks/*.png")} == {16}
        data = Segmentation("skin_lesion", size=(12, 16), architecture=UNet((2, 4))).load(
            load_site_file(tmp_path / f"{site}.yaml")
        )
        assert data.splits["train"].inputs.shape[1:] == (3, 12, 16)
    with pytest.raises(DataError, match="they need a size"):
        write_skin(tmp_path / "other", archive, "resolutions", size=None)


def test_what_is_missing_is_told_before_anything_is_written(archive: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    write_archive(broken)
    table = broken / "HAM10000_metadata.csv"
    with pytest.raises(DataError, match=r"Download the dataset 'HAM10000'.*MEDPFL_HAM10000"):
        write_skin(tmp_path / "out", tmp_path / "nowhere")
    (broken / "masks" / "ISIC_0003_segmentation.png").unlink()
    with pytest.raises(DataError, match="1 files of its table are not there, such as ISIC_0003_seg"):
        write_skin(tmp_path / "out", broken)
    text = table.read_text()
    for wrong, sentence in (
        (text.replace("dx,", "diagnosis,", 1), "HAM10000_metadata.csv has no column dx"),
        (text.replace(",bkl,", ",wart,"), r"HAM10000_metadata.csv:\d+: unknown diagnosis 'wart'"),
        (text.replace("vienna_dias", "elsewhere"), "has no row of the source vienna_dias"),
    ):
        table.write_text(wrong)
        with pytest.raises(DataError, match=sentence):
            write_skin(tmp_path / "out", broken)
    table.unlink()
    with pytest.raises(DataError, match=r"expected one table \*metadata.csv, found none"):
        write_skin(tmp_path / "out", broken)
    (tmp_path / "not.zip").write_text("no archive")
    with pytest.raises(DataError, match="expected a ZIP file or a folder"):
        write_skin(tmp_path / "out", tmp_path / "not.zip")
    assert not (tmp_path / "out").exists()


def test_the_command_and_the_jobs_demo(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["demo", "skin", str(tmp_path / "a"), "--data", str(archive)]
    done = CliRunner().invoke(app, [*command, "--hospitals", "hospitals", "--size", "8x6"])
    assert done.exit_code == 0 and sorted(path.stem for path in (tmp_path / "a").glob("*.yaml")) == [
        "rosendahl",
        "vidir",
    ]
    assert Image.open(next((tmp_path / "a" / "vidir" / "images").iterdir())).size == (8, 6)
    for option in (["--fold", "5"], ["--parts", "0"], ["--hospitals", "one"], ["--size", "0x6"], ["--size", "large"]):
        assert CliRunner().invoke(app, [*command, *option]).exit_code != 0
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(archive))
    assert prepare_demo("skin", tmp_path / "skin") == sorted(SOURCES)
    assert prepare_demo("skin_hospitals", tmp_path / "skin_hospitals") == ["rosendahl", "vidir"]


def test_the_real_table_is_cut_as_said(tmp_path: Path) -> None:
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "ham10000_200x150.zip"
    place = Path(os.environ.get(ENVIRONMENT_VARIABLE, beside))
    if not place.is_file():
        pytest.skip(f"ham10000_200x150.zip is not here; set {ENVIRONMENT_VARIABLE} to it")
    few = tmp_path / "few.zip"
    with zipfile.ZipFile(place) as whole, zipfile.ZipFile(few, "w") as part:
        header, *lines = whole.read("metadata.csv").decode().splitlines()
        rows = [row for row in csv.DictReader([header, *lines]) if row["dataset"] == "vienna_dias"]
        others = [row for row in csv.DictReader([header, *lines]) if row["dataset"] in SOURCES[:3]][::700]
        names = {row["image_id"] for row in [*rows, *others]}
        part.writestr("metadata.csv", "\n".join([header, *(line for line in lines if line.split(",")[1] in names)]))
        for name in names:
            stem = name.removesuffix(".jpg")
            for member in (f"images/{stem}.jpg", f"masks/{stem}_segmentation.png"):
                part.writestr(member, whole.read(member))
    write_skin(tmp_path / "out", few, size=(16, 12))
    listing = cases(tmp_path / "out", "vienna_dias", "skin_diagnosis")
    assert {split: len(each) for split, each in listing.items()} == {"train": 296, "validation": 68, "test": 75}
