# SPDX-License-Identifier: Apache-2.0
"""Rules about the code itself: which way imports point, file sizes, what is never imported where."""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "custom" / "medpfl"

# Each part may import itself and the parts before it.
LAYERS = [
    ["core"],
    ["data", "models", "store", "component"],
    ["tasks"],
    ["methods"],
    ["deployed", "results", "check"],
    ["rounds", "job", "demo", "bundle"],
    ["compare"],
    ["flare"],
    ["cli"],
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}


# What only some parts may import.
SHELLS: dict[str, set[str]] = {
    "nvflare": {"flare"},
    "monai": set(RANK) - {"core", "methods"},
    "benchmarks": set(),  # hospitals do not have it
}


@dataclass(frozen=True)
class Module:
    """A file of the package, read once for all rules."""

    name: str
    part: str
    text: str
    imports: frozenset[str]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return [read(path) for path in modules()]


def read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    inside = path.relative_to(PACKAGE)
    return Module(str(inside), inside.parts[0].removesuffix(".py"), text, frozenset(imports(text)))


def imports(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def violations(package: list[Module], refused: Callable[[Module, str], bool]) -> list[str]:
    return sorted(f"{module.name}: {name}" for module in package for name in module.imports if refused(module, name))


def test_imports_point_one_way(package: list[Module]) -> None:
    def points_up(module: Module, name: str) -> bool:
        first, *rest = name.split(".")
        return first == "medpfl" and bool(rest) and module.part in RANK and RANK.get(rest[0], -1) > RANK[module.part]

    assert {module.part for module in package} - {"__init__"} <= set(RANK)
    assert not violations(package, points_up)


@pytest.mark.parametrize("library", SHELLS)
def test_a_library_is_imported_in_its_parts_only(package: list[Module], library: str) -> None:
    allowed = SHELLS[library]
    assert not violations(package, lambda module, name: name.split(".")[0] == library and module.part not in allowed)


LIGHT = [  # in this order in one process: each is imported on top of those before it
    ("medpfl.cli", ["nvflare", "monai", "torch", "pandas"]),
    ("medpfl.core.mixers", ["nvflare", "monai", "pydantic", "pandas", "numba", "scipy"]),
    ("medpfl.methods.fedsm", ["nvflare", "monai", "pandas", "sklearn", "numba", "scipy"]),
    ("medpfl.rounds.simulate", ["nvflare", "monai", "pandas", "sklearn", "numba", "scipy", "nibabel"]),
    ("medpfl.flare.controller", ["monai", "matplotlib", "pandas", "sklearn", "numba", "scipy", "nibabel"]),
    ("medpfl.flare.executor", ["monai", "matplotlib", "pandas", "sklearn", "numba", "scipy", "nibabel"]),
]


@pytest.mark.slow
def test_importing_stays_light() -> None:
    """Every process of a federation and every command waits for its imports: libraries come where they are used."""
    code = "; ".join(f"import {module}; print([m for m in {absent} if m in sys.modules])" for module, absent in LIGHT)
    done = subprocess.run([sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True, check=True)
    assert dict(zip((module for module, _ in LIGHT), done.stdout.splitlines(), strict=True)) == dict.fromkeys(
        (module for module, _ in LIGHT), "[]"
    )


def test_no_file_is_long() -> None:
    folders = (ROOT / "poc", ROOT / "tests", ROOT / "benchmarks")
    tracked = [*modules(), *(path for folder in folders for path in folder.rglob("*.py"))]
    long = {str(p.relative_to(ROOT)): n for p in tracked if (n := len(p.read_text("utf-8").splitlines())) > 400}
    assert not long


def test_no_symbolic_links_in_jobs() -> None:
    assert not [path for path in (ROOT / "jobs").rglob("*") if path.is_symlink()]


def test_nothing_is_unpickled(package: list[Module]) -> None:
    unsafe = ("pickle", "dill", "joblib", "shelve", "marshal")
    assert not violations(package, lambda module, name: name.split(".")[0] in unsafe)
    assert not [module.name for module in package if "torch.load(" in module.text]


# What of a folder of components the rest may know: the contract, and the one list of methods by name.
CONTRACTS = {"methods": {"base", "site", "joint"}, "core.mixers": {"base"}, "core.codecs": {"base", "progress"}}
KNOWN_METHODS = {"base", "components", "joint", "references"}


def test_no_concrete_method_is_known_outside_methods(package: list[Module]) -> None:
    def concrete(module: Module, name: str) -> bool:
        pieces = name.split(".")
        inside = pieces[:2] == ["medpfl", "methods"] and len(pieces) > 2
        return inside and module.part != "methods" and pieces[2] not in KNOWN_METHODS

    assert not violations(package, concrete)


@pytest.mark.parametrize("folder", CONTRACTS)
def test_a_contract_imports_no_implementation(package: list[Module], folder: str) -> None:
    files = {f"{folder.replace('.', '/')}/{stem}.py" for stem in CONTRACTS[folder]}
    prefix = f"medpfl.{folder}."

    def implementation(module: Module, name: str) -> bool:
        inside = module.name in files and name.startswith(prefix)
        return inside and name.removeprefix(prefix).split(".")[0] not in CONTRACTS[folder]

    assert files <= {module.name for module in package}
    assert not violations(package, implementation)
