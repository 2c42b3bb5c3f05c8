# SPDX-License-Identifier: Apache-2.0
"""A run does not go on with other code of a class of one's own than it began with."""

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import yaml

from medpfl.component import class_name
from medpfl.core.codecs import Chain, Half
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.sources import foreign_code
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedavg import FedAvg
from medpfl.rounds.simulate import simulate
from small_jobs import small_job
from tools import assert_same, exchange, outcome, pieces, retell

METHOD = """
from medpfl.methods.fedavg import FedAvg
from .steps import TIMES

class Mine(FedAvg):
    def local_round(self, site):
        for _ in range(TIMES):
            site.fit("fedavg")
"""


READER = """
from dataclasses import replace
from medpfl.data.table.declare import Table
from .steps import TIMES

class Mine(Table):
    kind: str = "minepackage.reader.Mine"

    def load(self, spec):
        data = super().load(spec)
        splits = {name: replace(each, inputs=each.inputs * TIMES) for name, each in data.splits.items()}
        return replace(data, splits=splits)
"""


CODEC = """
from dataclasses import dataclass
import numpy as np
from medpfl.core.codecs import Half
from .steps import TIMES

@dataclass(frozen=True)
class Cut(Half):
    tag = "cut"

    def reduce(self, vector, seed):
        return np.where(np.abs(vector) > 1e-4 * TIMES, vector, 0).astype(np.float32)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code" / "minepackage"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from minepackage.mine import Mine\n")
    (folder / "mine.py").write_text(METHOD)
    (folder / "steps.py").write_text("TIMES = 1\n")
    (folder / "unused.py").write_text("")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "minepackage"]:
        del sys.modules[name]


def imported() -> type[FedAvg]:
    """The class as another process would find it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "minepackage"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    kind: type[FedAvg] = importlib.import_module("minepackage").Mine
    return kind


def job_of(kind: type[FedAvg]) -> Job:
    method = kind(lr=0.05)
    return small_job(rounds=3, mixers=dict(method.components()), method=method)  # type: ignore[arg-type]


def test_the_code_is_of_a_class_and_what_it_imports(package: Path) -> None:
    found = foreign_code([class_name(imported()), class_name(FedAvg)])
    assert found.keys() == {"minepackage.mine", "minepackage.steps"}
    (package / "mine.py").write_bytes(METHOD.replace("\n", "\r\n").encode())
    assert foreign_code(["minepackage.mine.Mine"]) == found
    (package / "steps.py").write_text("TIMES = (")
    other = foreign_code(["minepackage.mine.Mine"])
    assert other.keys() == found.keys() and other != found
    assert foreign_code(["minepackage.Mine"]).keys() == {*found, "minepackage"}
    assert set(foreign_code(["nowhere.Mine"])) == {"nowhere"}


@pytest.mark.parametrize(
    "mark", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe4\n"], ids=["byte order mark", "latin-1"]
)
def test_what_a_file_of_another_encoding_imports_counts_too(mark: bytes, package: Path) -> None:
    """With a byte order mark, as editors on Windows write it, nothing that it imports was looked at; Latin-1 was an
    error of Python's in the first exchange."""
    (package / "mine.py").write_bytes(mark + METHOD.encode())
    found = foreign_code([class_name(imported())])
    assert found.keys() == {"minepackage.mine", "minepackage.steps"}
    (package / "mine.py").write_text(METHOD)
    assert foreign_code(["minepackage.mine.Mine"]) == found


def test_a_package_may_do_without_what_it_tries_to_import(package: Path) -> None:
    """Every hospital's first answer was an error of Python's on a module that is not there."""
    (package / "heavy").mkdir()
    (package / "heavy" / "__init__.py").write_text("import no_such_library_anywhere\n")
    tried = "".join(
        f"try:\n    from minepackage.{name} import anything\nexcept ImportError:\n    pass\n"
        for name in ("gone.fast", "heavy", "heavy.fast", "steps.fast")
    )
    (package / "mine.py").write_text(METHOD + tried)
    found = foreign_code([class_name(imported())])
    assert found.keys() == {"minepackage.mine", "minepackage.steps"} | {
        f"minepackage.{name}" for name in ("gone.fast", "heavy", "heavy.fast", "steps.fast")
    }


def test_modules_without_a_package_that_lie_beside_one_another_count(package: Path) -> None:
    """A job's method in one file and its helper in the file beside it: the helper could change between two rounds."""
    folder = package.parent
    (folder / "minemethod.py").write_text("import json\nimport minehelper\nfrom medpfl.methods.fedavg import FedAvg\n")
    (folder / "minehelper.py").write_text("X = 1\n")
    importlib.invalidate_caches()
    found = foreign_code(["minemethod.Mine"])
    assert found.keys() == {"minemethod", "minehelper"}
    (folder / "minehelper.py").write_text("X = 2\n")
    assert foreign_code(["minemethod.Mine"]) != found


def test_a_compiled_module_counts(package: Path) -> None:
    (package / "mine.py").write_text(METHOD + "\ndef quick():\n    import minepackage.fast\n")
    fast = package / f"fast{EXTENSION_SUFFIXES[0]}"
    fast.write_bytes(b"one")
    importlib.invalidate_caches()
    found = foreign_code(["minepackage.mine.Mine"])
    fast.write_bytes(b"two")
    assert found["minepackage.fast"] and foreign_code(["minepackage.mine.Mine"]) != found


def test_an_interrupted_run_begins_anew_with_other_code(
    package: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def play(folder: str, stop_after: int | None = None) -> tuple[Path, str]:
        results = tmp_path / folder / "results"
        home = tmp_path / folder / "home"
        coordinator = simulate(job_of(imported()), table_sites, results, home, stop_after=stop_after)
        return results, str(coordinator.record.events)

    whole, _ = play("whole")
    play("cut", 2)
    (package / "unused.py").write_text("X = 1\n")
    cut, told = play("cut")
    assert "resumed after round 2" in told
    assert_same(outcome(cut), outcome(whole))

    play("changed", 2)
    (package / "steps.py").write_text("TIMES = 20\n")  # another size, so that Python compiles it anew
    changed, told = play("changed")
    assert "is kept and not resumed" in told
    assert_same(outcome(changed), outcome(play("anew")[0]))


def test_a_process_does_not_go_on_with_code_that_is_another_on_disk(
    package: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """As in a notebook whose kernel runs on: the rounds were told to be of the new code, and the old one made them; a
    new process took them up in silence."""
    job = job_of(imported())
    done = simulate(job, table_sites, tmp_path / "results", tmp_path / "home", stop_after=1)
    assert done.done == 1
    (package / "steps.py").write_text("TIMES = 20\n")
    with pytest.raises(ConfigError, match=r"^minepackage.steps has changed since it was imported here, .* restart"):
        simulate(job, table_sites, tmp_path / "results", tmp_path / "home", stop_after=2)
    (package / "steps.py").write_text("TIMES = 1  # as it was\n")
    assert "resumed after round 1" in str(
        simulate(job, table_sites, tmp_path / "results", tmp_path / "home", stop_after=2).record.events
    )
    (package / "steps.py").write_text("TIMES = 20\n")
    done = simulate(job_of(imported()), table_sites, tmp_path / "results", tmp_path / "home")
    assert "is kept and not resumed" in str(done.record.events)


def test_a_run_does_not_go_on_with_other_code_that_reads_its_data(
    package: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """It went on in silence, with inputs that meant something else."""
    (package / "reader.py").write_text(READER)
    for file in table_sites.values():
        content = yaml.safe_load(file.read_text())
        content["datasets"]["blood"]["kind"] = "minepackage.reader.Mine"
        file.write_text(yaml.safe_dump(content))

    def play(stop_after: int | None = None) -> str:
        imported()
        done = simulate(small_job(), table_sites, tmp_path / "results", tmp_path / "home", stop_after=stop_after)
        return str(done.record.events)

    play(2)
    (package / "steps.py").write_text("TIMES = 20\n")
    with pytest.raises(MedPFLError, match="a class of another package that it names has other code"):
        play()
    (package / "steps.py").write_text("TIMES = 1\n")
    assert "resumed after round 2" in play()


@pytest.mark.parametrize("way", ["to_site", "from_site"])
def test_an_interrupted_run_begins_anew_with_other_code_of_a_codec(
    way: str, package: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """It went on in silence: half of its rounds sent what the other code left of their updates."""
    (package / "cutting.py").write_text(CODEC)

    def play(stop_after: int | None = None) -> str:
        imported()
        chain = Chain(importlib.import_module("minepackage.cutting").Cut(), Half())
        job = dataclasses.replace(small_job(), codecs=Codecs(**{"to_site": None, "from_site": None, way: chain}))
        done = simulate(job, table_sites, tmp_path / "results", tmp_path / "home", stop_after=stop_after)
        return str(done.record.events)

    play(1)
    assert "resumed after round 1" in play(2)
    (package / "steps.py").write_text("TIMES = 20\n")
    assert "is kept and not resumed" in play()


def test_a_hospital_with_other_code_is_told(table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(small_job(), table_sites, tmp_path)
    replies = exchange(runners, coordinator.init_messages())
    retell(replies["clara"], config="other")
    coordinator.take_init(replies)
    told = [event.site for event in coordinator.record.events if "other code of the packages" in event.event]
    assert told == ["clara"]
