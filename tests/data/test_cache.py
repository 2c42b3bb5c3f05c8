# SPDX-License-Identifier: Apache-2.0
"""Prepared cases on disk: the same values bit for bit, never stale, never an error, private and bounded."""

import errno
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from forked import Forked
from medpfl.core.errors import DataError
from medpfl.data.cache import PreparedCases, Tensors, _libraries
from medpfl.data.declared import StorageRule
from medpfl.data.preparation import Spec
from medpfl.data.rows import CaseRows
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target
from pictures import MASKS, TABLE, write_images
from small_volumes import write_volume_sites

CLASSES, MASKED = Spec(Target.CLASS, ("images",), (6, 8)), Spec(Target.MASK, ("images",), (6, 8))
SLICES, WHOLE = (Spec(Target.MASK, ("volumes",), size, (2.0, 1.5, 2.0)) for size in ((8, 8), (8, 8, 4)))


def declare(folder: Path, **storage: Any) -> Path:
    """Twelve images with classes and masks."""
    if not (folder / "images").exists():
        write_images(folder)
    path = folder / "site.yaml"
    masks = {**MASKS, "labels": storage.pop("labels", MASKS["labels"])}
    path.write_text(yaml.safe_dump({"storage": storage, "datasets": {"a": {**TABLE, "masks": masks}}}))
    return path


def images(path: Path, spec: Spec = MASKED) -> SiteData:
    return load_site_file(path).load("a", spec)


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cache" / "medpfl-prepared").glob("*.case")}


def assert_same(one: SiteData, other: SiteData) -> None:
    assert list(one.splits) == list(other.splits) and one.preparation == other.preparation
    for mine, theirs in zip(one.splits.values(), other.splits.values(), strict=True):
        assert mine.names == theirs.names and np.array_equal(mine.case, theirs.case)
        for rows, others in ((mine.inputs, theirs.inputs), (mine.targets, theirs.targets)):
            assert getattr(rows, "shapes", rows.shape) == getattr(others, "shapes", others.shape)
            values, expected = (each.values if isinstance(each, CaseRows) else each for each in (rows, others))
            assert values.dtype == expected.dtype and values[:].numpy().tobytes() == expected[:].numpy().tobytes()


@pytest.fixture
def refuse_images(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No image is decoded any more."""

    def refuse() -> None:
        monkeypatch.setattr("medpfl.data.images.declare.read_image", None)

    return refuse


@pytest.mark.parametrize("spec", [CLASSES, MASKED])
def test_images_are_the_same_bit_for_bit(tmp_path: Path, spec: Spec, refuse_images: Callable[[], None]) -> None:
    plain = images(declare(tmp_path), spec)
    assert not (tmp_path / "cache").exists()
    path = declare(tmp_path, cache="cache")
    assert_same(images(path, spec), plain)
    assert len(kept(tmp_path)) == 12
    refuse_images()
    assert_same(images(path, spec), plain)


@pytest.mark.parametrize("spec", [SLICES, WHOLE])
@pytest.mark.slow
def test_volumes_are_the_same_bit_for_bit(tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_volume_sites(tmp_path, ("anna",))["anna"]
    plain = load_site_file(path).load("organ", spec)
    path.write_text(path.read_text() + "storage: {cache: cache}\n")
    assert_same(load_site_file(path).load("organ", spec), plain)
    assert len(kept(tmp_path)) == 10
    monkeypatch.setattr("medpfl.data.volumes.declare.read_image", None)
    assert_same(load_site_file(path).load("organ", spec), plain)


def test_only_this_user_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        images(declare(tmp_path, cache="cache"))
    finally:
        os.umask(before)
    folder = tmp_path / "cache" / "medpfl-prepared"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["images", "masks"])
def test_a_changed_file_is_prepared_anew(tmp_path: Path, kind: str) -> None:
    path = declare(tmp_path, cache="cache")
    before = images(path)
    file = sorted((tmp_path / kind).iterdir())[0]
    Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    after = images(path)
    assert_same(after, images(declare(tmp_path)))
    with pytest.raises(AssertionError):
        assert_same(after, before)
    assert len(kept(tmp_path)) == 13


@pytest.mark.parametrize("library", ["SimpleITK", "highdicom", "pyjpegls"])
def test_another_version_of_a_library_prepares_anew(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, asked = tmp_path / "case.nrrd", list[int]()
    source.write_bytes(b"a volume")
    for installed, times in (("1.0", 1), ("1.0", 1), ("1.1", 2), (None, 3)):

        def version_of(name: str, installed: str | None = installed) -> str:
            if name == library and installed is None:
                raise PackageNotFoundError(name)
            return installed or "" if name == library else "0"

        monkeypatch.setattr("medpfl.data.cache.version", version_of)
        _libraries.cache_clear()
        cases(tmp_path, 10**6).get([source], {}, noting(asked, 0))
        assert len(asked) == times
    monkeypatch.undo()
    _libraries.cache_clear()


def test_other_preparation_is_another_case(tmp_path: Path) -> None:
    path = declare(tmp_path, cache="cache")
    for spec in (MASKED, CLASSES, Spec(Target.MASK, ("images",), (8, 6))):
        images(path, spec)
    assert len(kept(tmp_path)) == 3 * 12


OWN = """
from medpfl.data.images.declare import Images

class Darker(Images):
    kind: str

    def _prepared(self, case, size, masked):
        made = super()._prepared(case, size, masked)
        return {**made, "image": made["image"] - DARKER}
"""


def test_a_kind_of_ones_own_whose_code_changed_prepares_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the old code had prepared was trained on, in silence."""
    monkeypatch.syspath_prepend(tmp_path)
    file = declare(tmp_path, cache="cache")
    file.write_text(file.read_text().replace("kind: images", "kind: darker.Darker"))
    means = []
    for by in (1, 1, 30):  # of another length, or Python may take what it had compiled
        (tmp_path / "darker.py").write_text(OWN.replace("DARKER", str(by)))
        means.append(mean_of(file, "darker"))
    assert means[0] == means[1] == pytest.approx(means[2] + 29, abs=1e-4)
    assert len(kept(tmp_path)) == 2 * 12


def mean_of(file: Path, *modules: str) -> float:
    """What is trained on, as a process would prepare it that has not imported these modules."""
    for name in modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return float(images(file).splits["train"].inputs[:].mean())


def test_so_does_one_that_imports_what_changed_and_comments_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beside its own was not looked at, and a comment prepared all cases anew."""
    monkeypatch.syspath_prepend(tmp_path)
    file = declare(tmp_path, cache="cache")
    file.write_text(file.read_text().replace("kind: images", "kind: dim.Darker"))
    means = []
    for by in (1, 30):
        (tmp_path / "howmuch.py").write_text(f"BY = {by}\n")
        for comment in ("", "# by so much\n"):
            (tmp_path / "dim.py").write_text(f"{comment}from howmuch import BY\n" + OWN.replace("DARKER", "BY"))
            means.append(mean_of(file, "dim", "howmuch"))
    assert means[0] == means[1] and means[2] == means[3] and means[0] == pytest.approx(means[2] + 29, abs=1e-4)
    assert len(kept(tmp_path)) == 2 * 12


def test_a_kind_that_has_no_file_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    asked = list[int]()
    for _ in range(2):
        kind = type("Kind", (), {"__module__": "a notebook"})
        cases(tmp_path, 10**6).get([tmp_path / "a"], {}, noting(asked, 0), [kind])
    assert asked == [0, 0] and not kept(tmp_path)


def test_labels_that_are_not_declared_any_more_are_refused(tmp_path: Path) -> None:
    """So are they where the hospital declares more labels first and fewer later."""
    declare(tmp_path)
    mask = tmp_path / "masks" / "i00_mask.png"
    Image.fromarray(np.full_like(np.asarray(Image.open(mask)), 2)).save(mask)
    more = {0: "background", 1: "lesion", 2: "hair"}
    images(declare(tmp_path, cache="cache", labels=more))
    for _ in range(2):
        with pytest.raises(DataError, match="label value 2 is not declared") as refused:
            images(declare(tmp_path, cache="cache"))
        assert "cache" not in f"{refused.value} {refused.value.public}".replace(str(tmp_path), "")


@pytest.mark.parametrize("damage", ["empty", "truncated", "changed", "another's", "gone", "a folder"])
def test_a_damaged_file_is_prepared_anew(tmp_path: Path, damage: str) -> None:
    path = declare(tmp_path, cache="cache")
    plain = images(path)
    good = kept(tmp_path)
    first, second = sorted(good)[:2]
    file = tmp_path / "cache" / "medpfl-prepared" / first
    if damage in ("gone", "a folder"):
        file.unlink()
    if damage == "a folder":
        file.mkdir()
        assert_same(images(path), plain)
        return
    changed = {"empty": b"", "truncated": good[first][:-9], "changed": good[first][:-1] + b"\x7f"}
    if damage != "gone":
        file.write_bytes(changed.get(damage, good[second]))
    assert_same(images(path), plain)
    assert kept(tmp_path) == good


def case(number: int, size: int = 1000) -> Callable[[], Tensors]:
    return lambda: {"image": torch.full((size,), float(number))}


def noting(asked: list[int], number: int) -> Callable[[], Tensors]:
    """``case``, and that it was asked for."""

    def prepare() -> Tensors:
        asked.append(number)
        return case(number)()

    return prepare


def cases(folder: Path, most: int, name: str = "cache") -> PreparedCases:
    """A cache of at most ``most`` bytes."""
    return PreparedCases(StorageRule(cache=name, cache_gb=most / 2**30), folder)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "cache" / "medpfl-prepared").iterdir())


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    sources = [tmp_path / f"{number}" for number in range(40)]
    for source in sources:
        source.touch()
    asked: list[int] = []

    def get(cache: PreparedCases, number: int) -> None:
        assert cache.get([sources[number]], {}, noting(asked, number))["image"].eq(number).all()

    most = 20 * 4200  # a case has 4000 bytes and its names
    for number in range(16):
        get(cases(tmp_path, most), number)
    for file in (tmp_path / "cache" / "medpfl-prepared").iterdir():
        os.utime(file, (1, 1))
    get(cases(tmp_path, most), 3)
    for number in range(20, 36):
        get(cases(tmp_path, most), number)
        assert bytes_in(tmp_path) <= most
    asked.clear()
    get(cases(tmp_path, most), 3)
    assert not asked
    for number in (0, 1, 2, *range(4, 16)):  # of these most are gone; which ones stayed is chance
        get(cases(tmp_path, most), number)
    assert len(asked) >= 8


def test_of_a_dataset_beyond_the_bound_a_part_stays(tmp_path: Path) -> None:
    sources = [tmp_path / f"{number}" for number in range(30)]
    for source in sources:
        source.touch()
    for turn in range(3):
        asked: list[int] = []
        cache = cases(tmp_path, 10 * 4200)
        for number, source in enumerate(sources):
            assert cache.get([source], {}, noting(asked, number))["image"].eq(number).all()
        assert bytes_in(tmp_path) <= 10 * 4200
        assert len(asked) == 30 if not turn else len(asked) <= 22


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    cases(tmp_path, 2000).get([tmp_path / "a"], {}, case(1))
    assert not bytes_in(tmp_path)


def test_only_own_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    folder = tmp_path / "cache" / "medpfl-prepared"
    cases(tmp_path, 8000).get([tmp_path / "a"], {}, case(1))
    for name in ("notes.txt", "new.part", "old.part"):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1, 1) if name != "new.part" else None)
    cases(tmp_path, 8000).get([tmp_path / "a"], {"other": True}, case(1))
    assert {path.name for path in folder.iterdir() if path.suffix != ".case"} == {"notes.txt", "new.part"}
    assert len(kept(tmp_path)) == 1


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.touch()

    def prepare() -> Tensors:
        source.write_text("changed")
        return case(1)()

    cases(tmp_path, 10**6).get([source], {}, prepare)
    assert not kept(tmp_path)


def test_a_full_disk_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = images(declare(tmp_path))

    def full(**where: object) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr("medpfl.data.cache.tempfile.mkstemp", full)
    assert_same(images(declare(tmp_path, cache="cache")), plain)
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage() and str(tmp_path) not in record.getMessage()


def test_a_folder_that_cannot_be_used_is_told_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = images(declare(tmp_path))
    (tmp_path / "cache").write_text("a file")
    assert_same(images(declare(tmp_path, cache="cache")), plain)
    (tmp_path / "linked").mkdir()
    (tmp_path / "cache").unlink()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "medpfl-prepared").symlink_to(tmp_path / "linked")
    assert_same(images(declare(tmp_path, cache="cache")), plain)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 and not list(tmp_path.glob("linked/*"))


def fill(folder: Path, most: int) -> None:
    for _ in range(4):
        cache = PreparedCases(StorageRule(cache="cache", cache_gb=most / 2**30), folder)
        for number in range(100):
            case = {"image": torch.full((1000,), float(number))}
            assert cache.get([folder / f"{number}"], {}, lambda case=case: case)["image"].eq(number).all()


@pytest.mark.parametrize("most", [10**6, 60 * 4200], ids=["all fit", "some are removed"])
@pytest.mark.slow
def test_two_processes_fill_it_at_once(tmp_path: Path, most: int) -> None:
    for number in range(100):
        (tmp_path / f"{number}").touch()
    both = [Forked(partial(fill, tmp_path, most), tmp_path / f"log-{number}") for number in range(2)]
    assert [process.ended() for process in both] == ["", ""]
    assert len(kept(tmp_path)) == 100 if most == 10**6 else 30 < len(kept(tmp_path)) < 100
    assert bytes_in(tmp_path) <= most * 17 / 16 and not list((tmp_path / "cache").rglob("*.part"))
