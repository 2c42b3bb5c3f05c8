# SPDX-License-Identifier: Apache-2.0
"""Files that were made to do harm, at a hospital: decompression bombs, YAML that multiplies itself, names with what
does not belong in one. Each is refused in one sentence, at once and without the memory that it asks for."""

import gzip
import io
import json
import resource
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pyarrow as pa
import pydicom
import pytest
import yaml
from pyarrow import parquet
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, generate_uid

from medpfl.compare.file import load_comparison
from medpfl.core.errors import ConfigError, DataError, MedPFLError, SiteFileError
from medpfl.data import pixels, untrusted
from medpfl.data.arrays.npz import Npz
from medpfl.data.cells import Cells, read_cells
from medpfl.data.declared import Problems
from medpfl.data.init.tables import read as read_for_init
from medpfl.data.series.recordings import read_arrays
from medpfl.data.site_file import load_site_file
from medpfl.data.volumes.nifti import stored_values
from medpfl.data.volumes.prepare import read_image
from medpfl.flare.provision import read_project
from medpfl.job.files import read_object
from small_jobs import write_table_sites

ZEROS = bytes(2**20)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Whatever the file claims: a second, which a busy machine may make two of, and no more than 200 MB."""
    import monai.data  # noqa: F401 (takes longer than all the rest)

    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - started < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def nifti_bomb(path: Path) -> Path:
    """A gigabyte of zeros in a megabyte, and a header that claims more."""
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.uint8)
    header.set_data_shape((30_000, 30_000, 30))
    header["magic"], header["vox_offset"] = b"n+1", 352
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    path.write_bytes(packed.compress(header.binaryblock + bytes(4)) + packed.compress(ZEROS * 4) + packed.flush())
    return path


def nifti_lie(path: Path) -> Path:
    """69 bytes, whose header promises 8 GB."""
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.float64)
    header.set_data_shape((1000, 1000, 1000))
    header.set_sform(np.eye(4), 1)
    header["magic"], header["vox_offset"] = b"n+1", 352
    content = header.binaryblock + bytes(1000)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def png_bomb(path: Path) -> Path:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(ZEROS * 4)) + chunk(b"IEND", b"")
    )
    return path


def dicom_bomb(path: Path, deflated: bool) -> Path:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.4"
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian if deflated else ExplicitVRLittleEndian
    data = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    data.Rows = data.Columns = 60_000
    data.SamplesPerPixel, data.BitsAllocated, data.PixelRepresentation = 1, 8, 0
    data.PhotometricInterpretation = "MONOCHROME2"
    data.PixelData = bytes(16)
    pydicom.dcmwrite(path, data, enforce_file_format=True)
    return path


def npz_bomb(path: Path, claims: tuple[int, ...], holds: int) -> Path:
    """An array that says it has ``claims`` entries of a byte; ``holds`` megabytes of zeros follow."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": claims})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("x.npy", "w", force_zip64=True) as stream:
        stream.write(header.getvalue())
        for _ in range(holds):
            stream.write(ZEROS)
    return path


BOMBS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nifti": (
        lambda folder: read_image(nifti_bomb(folder / "a.nii.gz")),
        r"a\.nii\.gz: holds 30000 x 30000 x 30 values",
    ),
    "short nifti": (
        lambda folder: read_image(nifti_lie(folder / "a.nii.gz")),
        r"a\.nii\.gz: its header promises voxels of 8000000000 bytes, which \d+ bytes cannot hold",
    ),
    "short label map": (
        lambda folder: stored_values(nifti_lie(folder / "a.nii")),
        r"a\.nii: its header promises voxels of 8000000000 bytes, which 1348 bytes cannot hold",
    ),
    "png": (
        lambda folder: pixels.read_image(png_bomb(folder / "a.png"), 1),
        r"a\.png: its header promises more pixels than are read, at most \d+$",
    ),
    "dicom": (lambda folder: read_image(dicom_bomb(folder / "a.dcm", False)), r"a\.dcm: holds 3600000000 values"),
    "deflated": (lambda folder: read_image(dicom_bomb(folder / "a.dcm", True)), r"a\.dcm: its header is compressed"),
    "array": (
        lambda folder: Npz(npz_bomb(folder / "a.npz", (300 * 2**20,), 300)).array("x"),
        r"a\.npz: 'x\.npy' has \d+ bytes and would become 3145\d+; more than 250 times",
    ),
    "claims": (lambda folder: Npz(npz_bomb(folder / "a.npz", (2**40,), 1)).array("x"), r"ends too early: its header"),
    "overflows": (
        lambda folder: Npz(npz_bomb(folder / "a.npz", (2**40, 2**40), 1)).array("x"),
        r"ends too early: its header",
    ),
    "series": (
        lambda folder: list(
            read_arrays(npz_bomb(folder / "a.npz", (300, 2**10, 2**10), 300), "a", "x", [], Problems())
        ),
        r"a\.npz: 'x\.npy' has \d+ bytes",
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.slow
def test_a_file_that_explodes(kind: str, tmp_path: Path) -> None:
    read, words = BOMBS[kind]
    with pytest.raises(DataError, match=words) as refused:
        read(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("MOST_VALUES", 10_000, r"holds 2000000 x 1 values"), ("_LARGE", 2**20, r"'x' has \d+ bytes and would become 16")],
)
def test_a_parquet_table_that_explodes(
    limit: str, value: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With smaller limits, so that no large file has to be made here."""
    file = tmp_path / "a.parquet"
    zeros = pa.table({"x": np.zeros(2_000_000, np.int64), "y": np.zeros(2_000_000, np.int64)})
    parquet.write_table(zeros, file, compression="zstd", use_dictionary=False)
    assert sum(len(piece) for piece in read_cells(file, "a", Cells(), Problems(), ["x"], {"x"})) == 2_000_000
    monkeypatch.setattr(untrusted, limit, value)
    with pytest.raises(DataError, match=words):
        next(iter(read_cells(file, "a", Cells(), Problems(), ["x"], {"x"})))
    with pytest.raises(DataError, match="holds 2000000 x 2 values" if limit == "MOST_VALUES" else words):
        read_for_init(file)


TEXT = "x" * 2**17


def repeated(file: Path, way: str) -> Path:
    """A text of 128 KiB that is in the file once and in the table 4000 times (40 times)."""
    if way == "delta":
        texts = pa.table({"x": pa.array([TEXT] * 40)})
        parquet.write_table(texts, file, use_dictionary=False, column_encoding={"x": "DELTA_BYTE_ARRAY"})
        return file
    codes = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array([TEXT]))
    table = pa.table({"x": codes})
    with parquet.ParquetWriter(file, table.schema, store_schema=way == "category") as writer:
        writer.write_table(table)  # without the schema it is a column of texts like any other
    return file


@pytest.mark.parametrize("way", ["text", "category", "delta"])
def test_a_text_that_a_parquet_table_repeats(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a gigabyte in a few kilobytes: of 4000 rows nothing was said in the footer."""
    if way == "delta":
        monkeypatch.setattr(untrusted, "_LARGE", 2**22)
    file = repeated(tmp_path / "a.parquet", way)
    for read in (lambda: list(read_cells(file, "a", Cells(), Problems(), ["x"])), lambda: read_for_init(file)):
        with pytest.raises(DataError, match=r"'x' has \d+ bytes and would become \d+; more than 250 times as many"):
            read()


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "multiplies": (LAUGHS, "has more than 200000 values, each counted wherever it is referred to"),
    "circle": ("datasets: &a\n  own: *a\n", "it refers to itself|found undefined alias"),
    "deep": ("[" * 20_000, "recursion|depth"),
    "tag": ("datasets: !!python/object/apply:os.system ['touch /tmp/x']\n", "could not determine a constructor"),
    "twice": ("site: anna\nsite: berta\n", "the key 'site' is there twice"),
    "binary": ("\0\1\2", "not valid YAML"),
    "long": ("# " + "x" * 2**22, "has more than 4194304 bytes"),
    "alike": (f"site: anna\n{2**61 - 1}: 1\n", "the key 2305843009213693951 is no label"),
    "infinite": (".inf: 1\n", "the key inf is no label"),
    "key of a list": ("? [a, b]\n: 1\n", "the key '.*' is a list or a mapping"),
}


@pytest.mark.parametrize("kind", YAML)
@pytest.mark.parametrize("read", [load_site_file, load_comparison, read_project])
@pytest.mark.slow
def test_yaml_that_is_an_attack(kind: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    text, words = YAML[kind]
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises((SiteFileError, ConfigError), match=words) as refused:
        read(tmp_path / "a.yaml")
    assert len(str(refused.value)) < 1000


@pytest.mark.slow
def test_yaml_of_very_many_keys(tmp_path: Path) -> None:
    """Each key was once compared with every other: 100 000 of them, in a file of 1 MB, took minutes."""
    (tmp_path / "a.yaml").write_text("\n".join(f"k{number}: 1" for number in range(20_000)))
    assert len(untrusted.load_yaml(tmp_path / "a.yaml")) == 20_000


def test_a_job_of_very_many_keys(tmp_path: Path) -> None:
    """As of YAML: 20 000 keys, in a file of 280 kB, took most of a minute."""
    (tmp_path / "a.json").write_text(json.dumps({f"k{number}": 1 for number in range(20_000)}))
    started = time.process_time()
    assert len(read_object(tmp_path / "a.json")) == 20_000
    assert time.process_time() - started < 2


def test_yaml_of_very_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted while the file is read: what stands after them is not even looked at."""
    monkeypatch.setattr(untrusted, "_NODES", 500)
    (tmp_path / "a.yaml").write_text("- x\n" * 1000 + "- [")
    with pytest.raises(yaml.YAMLError, match=r"has more than \d+ values"):
        untrusted.load_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "<script>", 'say "hi"', "line\nbreak", "\x1b[2J", "", "-x", "a" * 101]
)
@pytest.mark.parametrize("place", ["dataset", "checkpoint", "network"])
def test_a_name_with_what_does_not_belong_in_one(place: str, name: str, tmp_path: Path) -> None:
    file = write_table_sites(tmp_path, ["anna"])["anna"]
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    if place == "dataset":
        content["datasets"][name] = content["datasets"]["blood"]
    else:
        content[f"{place}s"] = {name: "x.safetensors" if place == "checkpoint" else {}}
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(SiteFileError, match=f"'{place}s': a name is letters, digits") as refused:
        load_site_file(file)
    assert refused.value.args[0].isprintable()


@pytest.mark.parametrize("name", ["line\nbreak", "\x1b[31mred", "\u202eright to left", "", "a" * 101])
def test_a_class_with_such_a_name(name: str, tmp_path: Path) -> None:
    file = write_table_sites(tmp_path, ["anna"])["anna"]
    content = yaml.safe_load(file.read_text())
    content["datasets"]["blood"]["label"]["classes"][name] = [2]
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(SiteFileError, match="1 to 100 characters that can be printed"):
        load_site_file(file)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"training": ' + "[" * 100_000, "\ud800", "NaN"])
def test_a_datalist_that_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "anna.yaml"
    (tmp_path / "list.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    content = {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}
    file.write_text(json.dumps({"datasets": {"organ": content}}))
    with pytest.raises(MedPFLError, match=r"list\.json"):
        load_site_file(file).datasets["organ"].cases(Problems())


def test_a_gzip_that_ends_in_the_middle(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.zeros((8, 8, 8), np.uint8), np.eye(4))
    packed = gzip.compress(image.to_bytes())
    (tmp_path / "a.nii.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"a\.nii\.gz: cannot be read as an image"):
        read_image(tmp_path / "a.nii.gz")
