# SPDX-License-Identifier: Apache-2.0
"""What cannot be written, or is no text, is told in one sentence by every verb that writes or reads a file."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import refusal
from medpfl.check import terminal_check
from medpfl.core.errors import MedPFLError
from medpfl.core.temporary import temporary_place
from medpfl.deployed.evaluate import write_cases, write_text
from medpfl.job import write_job
from medpfl.results.report import write_page
from medpfl.rounds import pretrain
from medpfl.tasks.contract import Evaluation
from small_jobs import small_job, write_table_sites
from summaries import result, summary


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A file where a folder should be."""
    path = tmp_path / "taken"
    path.touch()
    return path


@pytest.mark.parametrize("name", ["taken", "taken/below"])
def test_a_demo(capfd: pytest.CaptureFixture[str], taken: Path, name: str) -> None:
    assert f"cannot write the demo into {taken.parent / name}" in refusal(
        capfd, "demo", "patterns", taken.parent / name
    )


def test_a_demo_for_which_the_disk_is_too_small(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What breaks off in the middle of a file names no file: "None: No space left on device" was told."""

    def broken_off(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.savez", broken_off)
    monkeypatch.setattr("numpy.savez_compressed", broken_off)
    said = refusal(capfd, "demo", "patterns", tmp_path / "demo")
    assert f"cannot write the demo into {tmp_path / 'demo'}: No space left on device" in said


def test_a_disk_that_is_full_when_many_files_are_copied(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python collects what befell each file, and tells no error of the operating system's: it was a traceback."""

    def full() -> None:
        raise shutil.Error([("a", "kit/a", "[Errno 28] No space left on device"), ("b", "kit/b", "another")])

    monkeypatch.setattr("medpfl.licences.licences", full)
    assert "medpfl: cannot write kit/a: [Errno 28] No space left on device" in refusal(capfd, "licences")


@pytest.mark.parametrize("verb", ["report", "bundle import", "site doctor", "check-data", "check-job"])
def test_a_place_that_cannot_be_looked_at(capfd: pytest.CaptureFixture[str], verb: str, tmp_path: Path) -> None:
    """A folder that this account may not enter ended so, too; root may enter all of them."""
    more = ["--out", tmp_path / "out.safetensors"] if verb == "bundle import" else []
    said = refusal(capfd, *verb.split(), "x" * 300, *more)
    assert "medpfl: cannot use" in said and said.rstrip().endswith(": File name too long")


def test_a_text(taken: Path) -> None:
    for path in (taken / "page.html", taken.parent):
        with pytest.raises(MedPFLError, match=f"cannot write {path}"):
            write_text(path, "text")


def test_an_evaluation_s_cases(taken: Path) -> None:
    for path in (taken / "cases.csv", taken.parent):
        with pytest.raises(MedPFLError, match=f"cannot write {path}"):
            write_cases(path, Evaluation({}, [{"case": "one"}]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_what_is_printed_into_a_file_on_a_full_disk() -> None:
    """It was a traceback of fifty lines."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "medpfl", "jobs"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "medpfl: cannot write what the command prints: No space left on device\n"
    assert done.returncode == 1


def test_a_schema(capfd: pytest.CaptureFixture[str], taken: Path) -> None:
    site = write_table_sites(taken.parent / "sites", ["anna"])["anna"]
    assert f"cannot write {taken / 'schema.yaml'}" in refusal(capfd, "schema", site, "-o", taken / "schema.yaml")


def test_a_fingerprint_that_is_no_text(capfd: pytest.CaptureFixture[str], taken: Path) -> None:
    taken.write_bytes(b"\x1f\x8b\xff")
    assert "no text; expected a file of 'medpfl fingerprint'" in refusal(capfd, "plan", "organ", taken)


def test_a_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(MedPFLError, match=r"cannot write .*report\.html: Is a directory"):
        write_page(tmp_path, summary((result("anna", "local", 0.5, None), 0.5)), [], {}, [])


def test_the_page_of_a_data_check_before_the_data_are_read(
    capfd: pytest.CaptureFixture[str], taken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take hours: what they gave would be told nowhere."""
    assert "cannot read the site file" in refusal(capfd, "check-data", taken.parent / "nowhere" / "site.yaml")
    monkeypatch.setattr(terminal_check, "check_data", lambda *_: pytest.fail("the data were read"))
    site = write_table_sites(taken.parent / "sites", ["anna"])["anna"]
    said = refusal(capfd, "check-data", site, "--page", taken / "page.html")
    assert f"cannot write the page {taken / 'page.html'}: Not a directory; name another with --page" in said


def test_a_checkpoint_before_it_is_trained(
    capfd: pytest.CaptureFixture[str], taken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "pretrain", lambda *_: pytest.fail("it was trained"))
    write_table_sites(taken.parent / "sites", ["anna"])
    job = write_job(small_job(1), taken.parent / "job")
    said = refusal(capfd, "pretrain", job, "--sites", taken.parent / "sites", "-o", taken / "blood.safetensors")
    assert f"cannot write the results folder {taken}: File exists" in said


def test_no_temporary_folder(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As in a container whose disk is read-only, or where it is full: these ended with a traceback."""
    sites = write_table_sites(tmp_path / "sites")
    job = write_job(small_job(1), tmp_path / "job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", None)
        patch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/nowhere"])
        for verb in ("simulate", "leave-one-out", "check-job"):
            said = refusal(capfd, verb, job, "--sites", sites["anna"].parent)
            assert "no folder for temporary files can be written: No usable temporary directory" in said
            assert "TMPDIR=FOLDER" in said
        with pytest.raises(MedPFLError, match="no folder for temporary files can be written"):
            temporary_place()
