# SPDX-License-Identifier: Apache-2.0
"""The key's file: for its owner's eyes only, made once."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from medpfl import store
from medpfl.cli import app
from medpfl.core.errors import MedPFLError
from medpfl.privacy.keys import FILE, make_key, read_key


def test_made_shown_and_never_overwritten(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["keys", "make", str(tmp_path / "new")], catch_exceptions=False)
    path = tmp_path / "new" / FILE
    assert made.exit_code == 0 and path.stat().st_mode & 0o777 == 0o600
    shown = CliRunner().invoke(app, ["keys", "show", str(path)], catch_exceptions=False)
    assert shown.output.strip() == read_key(path).fingerprint and shown.output.strip() in made.output
    with pytest.raises(MedPFLError, match="is there already"):
        make_key(tmp_path / "new")


def test_the_page_tells_how_large_it_is_and_how_long_its_fingerprint(tmp_path: Path) -> None:
    path, key = make_key(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "encryption.md").read_text(encoding="utf-8")
    said = re.search(rf"`KEYS/{re.escape(FILE)}` \((\d+) kB,", page)
    assert said  # what is drawn at random is packed, so that no two files are of one length
    assert path.stat().st_size / 1000 == pytest.approx(float(said[1]), rel=0.06)
    assert "a fingerprint of sixteen characters" in page and len(key.fingerprint) == 16


def test_a_file_that_is_not_for_its_owner_alone_or_no_key(tmp_path: Path) -> None:
    path, _ = make_key(tmp_path)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(MedPFLError, match="others than its owner"):
            read_key(path)
    path.chmod(0o600)
    with pytest.raises(MedPFLError, match="No such file"):
        read_key(tmp_path / "other.key")
    damaged = Path(shutil.copy(path, tmp_path / "damaged.key"))
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    with pytest.raises(MedPFLError, match="damaged"):
        read_key(damaged)
    tensors, _ = store.read(path)
    store.save(tmp_path / "model.key", tensors, {"kind": "model"})
    (tmp_path / "model.key").chmod(0o600)
    with pytest.raises(MedPFLError, match="no key of 'medpfl keys make'"):
        read_key(tmp_path / "model.key")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_a_key_of_numbers_that_are_no_bytes(kind: torch.dtype, tmp_path: Path) -> None:
    """bfloat16 ended 'medpfl keys show' with a TypeError."""
    path, _ = make_key(tmp_path)
    store.save(path, {"key": torch.zeros(100).to(kind)}, store.read(path)[1])
    path.chmod(0o600)
    with pytest.raises(MedPFLError, match="no key of 'medpfl keys make'"):
        read_key(path)
