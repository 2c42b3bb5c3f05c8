# SPDX-License-Identifier: Apache-2.0
"""What goes into a packed job of other people's packages: their code, and nothing else that lies beside it."""

import importlib
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from medpfl.core.codecs import Chain, Half
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.flare.pack import pack
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.softpull import SoftPull
from tools import write_job

CODE = """
from dataclasses import dataclass
from medpfl.methods.softpull import SoftPull

@dataclass(frozen=True)
class Ours(SoftPull):
    '''SoftPull by another name.'''
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code" / "our_methods"
    for name, text in {
        "ours.py": CODE,
        "inner/helper.py": "",
        "data/patients.csv": "Meier,1950",
        "notes.ipynb": "{}",
        ".env/token.py": "",
        "__pycache__/old.pyc": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "our_methods"]:
        del sys.modules[name]


def test_a_full_disk_is_told_and_nothing_is_left_on_it(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Copying many files raises an error without the operating system's words: "None" was told."""
    job, before = write_job(make_job(), tmp_path / "job"), resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "packed").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(MedPFLError, match=r"cannot write .*small: .*File too large"):
            pack(job, tmp_path / "packed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "packed").iterdir())


@pytest.mark.parametrize("regular", [True, False])
def test_only_code_goes_in(regular: bool, package: Path, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """A table of patients beside the code went to every hospital; a package without __init__.py could not be packed."""
    if regular:
        (package / "__init__.py").touch()
    method = importlib.import_module("our_methods.ours").Ours
    said: list[str] = []
    folder = pack(write_job(make_job(method=method()), tmp_path / "job"), tmp_path / "packed", noticed=said.append)
    packed = folder / "app" / "custom" / "our_methods"
    found = {path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file()}
    assert found == {"ours.py", "inner/helper.py", *(["__init__.py"] if regular else [])}
    assert not (packed / "data").exists()
    assert (folder / "app" / "custom" / "medpfl" / "compare" / "report.html").is_file()
    left = "our_methods/data/patients.csv, our_methods/notes.ipynb"
    assert len(said) == 1 and said[0].endswith(f"; left out: {left}")


def test_a_folder_that_is_a_link_is_told(package: Path, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Its code was not packed, and nothing said so: the job failed at every hospital."""
    (package / "inner" / "helper.py").rename(tmp_path / "helper.py")
    (package / "inner").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "helper.py").rename(tmp_path / "elsewhere" / "helper.py")
    (package / "inner").symlink_to(tmp_path / "elsewhere")
    method = importlib.import_module("our_methods.ours").Ours
    said: list[str] = []
    folder = pack(write_job(make_job(method=method()), tmp_path / "job"), tmp_path / "packed", noticed=said.append)
    assert not (folder / "app" / "custom" / "our_methods" / "inner").exists()
    assert "none of folders that are links; left out: our_methods/data/patients.csv, our_methods/inner," in said[0]


CODEC = """
from dataclasses import dataclass
from medpfl.core.codecs import Half

@dataclass(frozen=True)
class OurCodec(Half):
    tag = "ours"
"""


def test_the_code_of_a_codec_goes_in_too(package: Path, make_job: Callable[..., Job], tmp_path: Path) -> None:
    """The job had it not, so that no site could build the codec."""
    (package / "__init__.py").touch()
    (package / "codec.py").write_text(CODEC)
    ours = importlib.import_module("our_methods.codec").OurCodec
    job = replace(make_job(), codecs=Codecs(None, Chain(ours(), Half())))
    folder = pack(write_job(job, tmp_path / "job"), tmp_path / "packed", noticed=lambda said: None)
    assert (folder / "app" / "custom" / "our_methods" / "codec.py").is_file()


@dataclass(frozen=True, kw_only=True)
class InAScript(SoftPull):
    """As it is where the script that defines it is run."""

    __module__ = "__main__"


def test_a_job_with_a_class_that_nobody_else_can_import_is_not_written(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """It was written in silence, and no site could read it."""

    @dataclass(frozen=True, kw_only=True)
    class InAFunction(SoftPull):
        pass

    for method in (InAScript(), InAFunction()):
        name = type(method).__name__
        with pytest.raises(ConfigError, match=f"cannot be written: {name} is defined in a script, a notebook's cell"):
            write_job(make_job(method=method), tmp_path / "job")
    assert not (tmp_path / "job").exists()
