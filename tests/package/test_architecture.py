# SPDX-License-Identifier: Apache-2.0
"""Rules about the code itself: which way imports point, file sizes, what is never imported where."""

import ast
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "custom" / "medpfl"

# Each part may import itself and the parts before it.
LAYERS = [
    ["core"],
    ["data", "models", "store", "component", "licences"],
    ["privacy"],
    ["augment"],
    ["tasks"],
    ["methods"],
    ["deployed", "results", "check"],
    ["job", "demo", "bundle"],
    ["rounds"],
    ["compare"],
    ["flare"],
    ["api"],
    ["cli"],
    ["__main__"],
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}


# What only some parts may import.
SHELLS: dict[str, set[str]] = {
    "nvflare": {"flare"},
    "monai": set(RANK) - {"core", "methods"},
    "opacus": {"privacy"},
    "benchmarks": set(),  # hospitals do not have it
}


@dataclass(frozen=True)
class Module:
    """A file of the package, read once for all rules."""

    name: str
    part: str
    text: str
    pairs: frozenset[tuple[str, str]]
    """What is imported from where; "": the module itself."""

    @property
    def imports(self) -> set[str]:
        """Every dotted name that is imported, and the modules that names are imported from."""
        return {f"{source}.{name}" if name else source for source, name in self.pairs} | {s for s, _ in self.pairs}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return [read(path) for path in modules()]


def read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    inside = path.relative_to(PACKAGE)
    return Module(str(inside), inside.parts[0].removesuffix(".py"), text, frozenset(imported(text)))


def imported(text: str) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def graph(package: list[Module]) -> dict[str, set[str]]:
    """Module to the modules of the package that it imports."""
    return edges({dotted(module.name): module.pairs for module in package})


def edges(pairs: Mapping[str, Collection[tuple[str, str]]]) -> dict[str, set[str]]:
    """Module to those among these that it imports, wherever in the file: inside functions too."""
    return {
        module: {
            f"{source}.{name}" if f"{source}.{name}" in pairs else source for source, name in its if source in pairs
        }
        for module, its in pairs.items()
    }


def dotted(file: str, top: str = "medpfl.") -> str:
    return f"{top}{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """One cycle, of any length; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def violations(package: list[Module], refused: Callable[[Module, str], bool]) -> list[str]:
    return sorted(f"{module.name}: {name}" for module in package for name in module.imports if refused(module, name))


@pytest.mark.slow
def test_imports_point_one_way(package: list[Module]) -> None:
    def points_up(module: Module, name: str) -> bool:
        first, *rest = name.split(".")
        return first == "medpfl" and bool(rest) and module.part in RANK and RANK.get(rest[0], -1) > RANK[module.part]

    assert {module.part for module in package} - {"__init__"} <= set(RANK)
    assert not violations(package, points_up)


def test_no_import_cycle_between_modules(package: list[Module]) -> None:
    """Of any length, with imports inside functions and for type checking only."""
    assert not cycle(graph(package))


@pytest.mark.slow
def test_no_import_cycle_beside_the_package() -> None:
    paths = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    for folder in (ROOT / "tests" / "support", ROOT / "tests" / "example_package"):  # where pytest looks for imports
        paths |= {dotted(str(path.relative_to(folder)), ""): path for path in folder.rglob("*.py")}
    paths |= {dotted(str(path.relative_to(ROOT)), ""): path for path in (ROOT / "benchmarks").rglob("*.py")}
    found = edges({name: imported(path.read_text("utf-8")) for name, path in paths.items()})
    assert "test_architectures" in found["test_extractor"] and "benchmarks.common" in found["benchmarks.mixing"]
    assert "small_jobs" in found["every_method"]
    assert not cycle(found)


def test_no_import_cycle_between_parts(package: list[Module]) -> None:
    """Parts of one layer may import each other, but not both ways."""
    parts: dict[str, set[str]] = {part: set() for part in RANK}
    for name, imported in graph(package).items():
        first = name.split(".")[1:2]
        for other in imported:
            second = other.split(".")[1:2]
            if first and second and first != second:
                parts[first[0]].add(second[0])
    assert not cycle(parts)


@pytest.mark.parametrize("side, other", [("hospital", "server"), ("server", "hospital")])
def test_neither_side_of_a_job_imports_the_other(package: list[Module], side: str, other: str) -> None:
    """They share types of messages, and what lies beside their folders."""
    there = [module for module in package if module.name.startswith(f"rounds/{side}/")]
    assert len(there) > 10
    assert not violations(there, lambda module, name: name.startswith(f"medpfl.rounds.{other}"))


@pytest.mark.parametrize("library", SHELLS)
def test_a_library_is_imported_in_its_parts_only(package: list[Module], library: str) -> None:
    allowed = SHELLS[library]
    assert not violations(package, lambda module, name: name.split(".")[0] == library and module.part not in allowed)


LIGHT = [  # in this order in one process: each is imported on top of those before it
    ("medpfl.cli", ["nvflare", "monai", "torch", "pandas"]),
    ("medpfl.core.mixers", ["nvflare", "monai", "pydantic", "pandas", "numba", "scipy"]),
    ("medpfl.methods.fedsm", ["nvflare", "monai", "pandas", "sklearn", "numba", "scipy"]),
    (
        "medpfl.rounds.simulate",
        ["nvflare", "monai", "opacus", "pandas", "sklearn", "numba", "scipy", "nibabel", "tenseal"],
    ),
    (
        "medpfl.compare.worker",
        ["nvflare", "monai", "opacus", "matplotlib", "pandas", "sklearn", "numba", "scipy", "nibabel", "pydicom"],
    ),
    (
        "medpfl.flare.controller",
        ["monai", "opacus", "matplotlib", "pandas", "sklearn", "numba", "scipy", "nibabel", "tenseal"],
    ),
    (
        "medpfl.flare.executor",
        ["monai", "opacus", "matplotlib", "pandas", "sklearn", "numba", "scipy", "nibabel", "tenseal"],
    ),
]


@pytest.mark.slow
def test_importing_stays_light() -> None:
    """Every process of a federation and every command waits for its imports: libraries come where they are used."""
    code = "; ".join(f"import {module}; print([m for m in {absent} if m in sys.modules])" for module, absent in LIGHT)
    done = subprocess.run([sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True, check=True)
    assert dict(zip((module for module, _ in LIGHT), done.stdout.splitlines(), strict=True)) == dict.fromkeys(
        (module for module, _ in LIGHT), "[]"
    )


def test_shipped_jobs_are_found_without_waiting_for_numpy() -> None:
    code = "import sys, medpfl.bundle; print([name for name in ('numpy', 'torch', 'nibabel') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_file_is_long() -> None:
    folders = (ROOT / "poc", ROOT / "tests", ROOT / "benchmarks")
    tracked = [*modules(), *(path for folder in folders for path in folder.rglob("*.py"))]
    long = {str(p.relative_to(ROOT)): n for p in tracked if (n := len(p.read_text("utf-8").splitlines())) > 400}
    assert not long


def test_mappings_say_what_they_hold(package: list[Module]) -> None:
    assert not [module.name for module in package if "dict[str, Any]" in module.text]


def test_no_symbolic_links_in_jobs() -> None:
    assert not [path for path in (ROOT / "jobs").rglob("*") if path.is_symlink()]


def test_nothing_is_unpickled(package: list[Module]) -> None:
    """But for tensors of a MONAI bundle, by torch's reader that takes nothing else."""
    bundle, error = "deployed/bundle_import.py", ("pickle", "pickle.UnpicklingError")
    unsafe = ("pickle", "dill", "joblib", "shelve", "marshal")
    assert not violations(
        package,
        lambda module, name: name.split(".")[0] in unsafe and not (module.name == bundle and name in error),
    )
    assert [module.name for module in package if "torch.load(" in module.text] == [bundle]
    (text,) = [module.text for module in package if module.name == bundle]
    assert text.count("torch.load(") == text.count('torch.load(path, map_location="cpu", weights_only=True)') == 1


# A folder of components has a contract, which imports nothing else of it; the rest of the package knows that only.
CONTRACTS = {
    "methods": {
        "contract",
        "batches",
        "deployed_names",
        "effective_samples",
        "hospital",
        "joint_study",
        "optimizers",
        "panels",
        "precision",
        "presented",
        "proximal",
        "returned",
        "schedules",
        "site",
        "start",
        "training",
    },
    "core.mixers": {"contract"},
    "core.codecs": {"contract", "progress"},
}
REGISTRY = "medpfl.methods.references"  # the one list of methods by name
RECIPES = "flare/recipes.py"  # a recipe a method, typed by it
# Modules that offer components, and what of them is no concrete one; who else may import from them.
OFFERED = {
    "core.mixers": ({"Mixer", "RoundInfo", "NoDefault"}, {"core", "methods"}),
    "core.codecs": ({"Codec", "Progress", "encode_with_feedback", "decode", "check_known"}, {"core"}),
    "methods.optimizers": ({"Optimizer"}, {"methods"}),
    "methods.schedules": ({"Schedule"}, {"methods"}),
}
TASKS = {"classification", "segmentation", "tabular", "time_series"}
KINDS = {"arrays", "images", "series", "table", "volumes"}


def test_no_concrete_method_is_known_outside_methods(package: list[Module]) -> None:
    known = {f"medpfl.methods.{name}" for name in CONTRACTS["methods"]} | {REGISTRY}

    def concrete(module: Module, name: str) -> bool:
        inside = name.startswith("medpfl.methods.") and module.part != "methods" and module.name != RECIPES
        return inside and ".".join(name.split(".")[:3]) not in known and name != "medpfl.methods.references"

    assert not violations(package, concrete)


def test_no_concrete_component_is_known_where_any_will_do(package: list[Module]) -> None:
    """Mixers, codecs, optimisers and schedules: only their base classes leave their rooms."""
    found = [
        f"{module.name}: {source}.{name}"
        for module in package
        for source, name in module.pairs
        for folder, (offered, rooms) in OFFERED.items()
        if source.removeprefix("medpfl.") == folder and module.part not in rooms and name not in offered
    ]
    assert not sorted(found)


def test_tasks_and_kinds_of_datasets_are_known_in_their_lists_only(package: list[Module]) -> None:
    """But for the planning of 3-D jobs, which is about volumes and their segmentation."""

    def concrete(module: Module, name: str) -> bool:
        pieces = name.split(".")[1:3]
        task = pieces[0] == "tasks" and pieces[-1] in TASKS and module.part != "tasks"
        kind = pieces[0] == "data" and pieces[-1] in KINDS and name.split(".")[3:4] == ["declare"]
        at_home = module.name.startswith("/".join(pieces)) or module.name == "data/kinds.py"
        return (task or (kind and not at_home)) and module.name != "cli/planning.py"

    package = [module for module in package if not module.name.startswith("demo/")]
    assert not violations(package, lambda module, name: len(name.split(".")) > 2 and concrete(module, name))


@pytest.mark.parametrize("folder", CONTRACTS)
def test_a_contract_imports_no_implementation(package: list[Module], folder: str) -> None:
    files = {f"{folder.replace('.', '/')}/{stem}.py" for stem in CONTRACTS[folder]}
    prefix = f"medpfl.{folder}."

    def implementation(module: Module, name: str) -> bool:
        inside = module.name in files and name.startswith(prefix)
        return inside and name.removeprefix(prefix).split(".")[0] not in CONTRACTS[folder]

    assert files <= {module.name for module in package}
    assert not violations(package, implementation)
