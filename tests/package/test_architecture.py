# SPDX-License-Identifier: Apache-2.0
"""Rules about the code itself: which way imports point, file sizes, what is never imported where."""

import ast
import subprocess
import sys
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
    ["bench", "cli"],
]
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] == "medpfl" and len(pieces) > 1 and pieces[1] in RANK:
            assert RANK[pieces[1]] <= RANK[part], f"{path.name} ({part}) imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nvflare_is_imported_in_the_shell_only(path: Path) -> None:
    if part_of(path) not in ("flare", "bench"):
        assert not any(name.split(".")[0] == "nvflare" for name in imports(path))
    if part_of(path) in ("core", "methods"):
        assert not any(name.split(".")[0] == "monai" for name in imports(path))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("medpfl.core.mixers", ["nvflare", "monai", "pydantic", "pandas"]),
        ("medpfl.rounds.simulate", ["nvflare", "monai"]),
        ("medpfl.flare.controller", ["monai", "matplotlib"]),
        ("medpfl.cli", ["nvflare", "monai", "torch"]),
    ],
)
def test_importing_stays_light(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_file_is_long() -> None:
    tracked = [*modules(), *(ROOT / "poc").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    long = {str(p.relative_to(ROOT)): n for p in tracked if (n := len(p.read_text("utf-8").splitlines())) > 400}
    assert not long


def test_no_symbolic_links_in_jobs() -> None:
    assert not [path for path in (ROOT / "jobs").rglob("*") if path.is_symlink()]


def test_nothing_is_unpickled() -> None:
    for path in modules():
        for name in imports(path):
            assert name.split(".")[0] not in ("pickle", "dill", "joblib", "shelve", "marshal"), path
        assert "torch.load(" not in path.read_text(encoding="utf-8"), path
