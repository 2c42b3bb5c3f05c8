# SPDX-License-Identifier: Apache-2.0
"""Which source files make a run another run."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from comparing import SOFT, plan_of
from medpfl.core import sources
from medpfl.core.sources import source_digest, sources_of

METHODS = {path.stem for path in Path(sources.__file__).parents[1].joinpath("methods").glob("*.py")}


@pytest.mark.parametrize(
    ("component", "own", "helpers"),
    [
        ("medpfl.methods.fedprox", {"fedprox"}, {"medpfl.methods.proximal"}),
        ("medpfl.methods.fedrod", {"divergence", "fedrod"}, {"medpfl.methods.features"}),
        ("medpfl.methods.lg_fedavg", {"lg_fedavg", "fedper"}, {"medpfl.core.groups"}),
        ("medpfl.tasks.tabular", set(), {"medpfl.tasks.labelled", "medpfl.data.table.declare"}),
        ("medpfl.models.resnet", set(), {"medpfl.models.contract"}),
        ("medpfl.core.mixers.relaxed_mean", set(), {"medpfl.core.mixers.mean", "medpfl.core.mixers.contract"}),
        ("medpfl.compare.pooled", set(), {"medpfl.data.samples"}),
    ],
)
def test_what_a_component_inherits_and_calls_counts(component: str, own: set[str], helpers: set[str]) -> None:
    found = set(sources_of(["medpfl.rounds.simulate", component]))
    always = {
        f"medpfl.{name}"
        for name in ("methods.contract", "core.mixing", "core.seeding", "rounds.hospital.site", "data.splits")
    }
    always |= {
        f"medpfl.{name}"
        for name in ("rounds.server.coordinator", "deployed.model_file", "tasks.contract", "store", "component")
    }
    assert always | helpers | {component} <= found
    # Another method's file does not, nor do a list of all components, the pages, the command line, or FLARE's shell.
    beyond = {name.removeprefix("medpfl.methods.") for name in found - set(sources_of(["medpfl.rounds.simulate"]))}
    assert beyond & METHODS <= own | {"proximal", "features"}
    assert not {"ditto", "moon", "ifca", "scaffold"} & {name.rpartition(".")[2] for name in found}
    assert not {"medpfl.core.mixers", "medpfl.results.report", "medpfl.compare.report"} & found
    assert not [name for name in found if name.startswith(("medpfl.cli", "medpfl.flare", "benchmarks"))]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """A method's package on disk; called with a file's name and its new text, it returns the method's digest."""
    folder = tmp_path / "sourcepkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("from sourcepkg.method import Mine\n")
    (folder / "method.py").write_text(
        "from .helper import LIMIT\nfrom sourcepkg import other\n\nclass Mine:\n    x = LIMIT\n"
    )
    (folder / "helper.py").write_text('"""What helps."""\nLIMIT = 1\n')
    (folder / "other.py").write_text("import math\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(name: str = "helper.py", text: str = "") -> str:
        if text:
            (folder / name).write_text(text)
        importlib.invalidate_caches()
        sources._known.clear()
        sources._defining.cache_clear()
        return source_digest(["sourcepkg.method"])

    yield digest
    for name in [name for name in sys.modules if name.partition(".")[0] == "sourcepkg"]:
        del sys.modules[name]


def test_code_counts_and_comments_do_not(package: Callable[..., str]) -> None:
    first = package()
    assert package("helper.py", '"""Says it better."""\n\n# Why: because.\nLIMIT = (1)\n"""What it is."""\n') == first
    assert package("new_method.py", "class New:\n    pass\n") == first  # beside the others
    assert package("__init__.py", "from sourcepkg.method import Mine\nfrom sourcepkg.new_method import New\n") == first
    assert package("helper.py", "LIMIT = 2\n") != first
    assert package("helper.py", "LIMIT = 1\n") == first
    assert package("other.py", "import cmath\n") != first


def test_what_a_package_itself_makes_counts(package: Callable[..., str]) -> None:
    """Of what is no class and no function, but an object of somebody else's class, the class's module counted, and not
    where the object is made: another label smoothing repeated no run."""
    made = "from torch import nn\n\nLOSS = nn.CrossEntropyLoss(label_smoothing={})\n"
    package("__init__.py", made.format(0.1))
    first = package("method.py", "from sourcepkg import LOSS\n\nclass Mine:\n    loss = LOSS\n")
    assert package("__init__.py", made.format(0.1) + "# as it was\n") == first
    assert package("__init__.py", made.format(0.2)) != first


def test_what_lies_beside_a_package_counts_unless_it_is_installed(
    package: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a method in a single file, with what it uses in another one beside it, runs of the old code were kept in
    silence after the other file had changed."""
    (tmp_path / "flathelper.py").write_text("LIMIT = 1\n")
    first = package("method.py", "import torch\nfrom flathelper import LIMIT\n\nclass Mine:\n    x = LIMIT\n")
    assert {name.partition(".")[0] for name in sources_of(["sourcepkg.method"])} == {"sourcepkg", "flathelper"}
    (tmp_path / "flathelper.py").write_text("LIMIT = 2\n")
    assert package() != first
    (tmp_path / "installed-1.0.dist-info").mkdir()
    assert set(sources_of(["sourcepkg.method"])) == {"sourcepkg.method"}


@pytest.mark.slow
def test_runs_of_a_method_do_not_depend_on_the_others(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    methods = {"Soft": SOFT, "Prox": {"path": "medpfl.methods.fedprox.FedProx"}}
    alone = {run.name: run.digest for run in plan_of(tmp_path, table_sites).runs}
    beside = {run.name: run.digest for run in plan_of(tmp_path, table_sites, methods=methods, pooled=True).runs}
    assert {name: beside[name] for name in alone} == alone and len(set(beside.values())) == 5
