# SPDX-License-Identifier: Apache-2.0
"""Which source files a run's result depends on: a changed one makes another run.

They are the modules that compute (the round loop, those of the run's components) and what these import, directly or
not, within MedPFL and the components' own packages. A package that only passes a name on is looked through to the
module that defines it, so that a new method or server component beside the old ones changes nothing. Comments,
docstrings and layout do not count.
"""

import ast
import functools
import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from medpfl.rounds.messages import digest_of

PAGES = {"medpfl.results.report", "medpfl.deployed.card"}
"""They write what people read; no number comes from them."""


def source_digest(roots: Iterable[str]) -> str:
    """One digest over the code of ``roots`` (module names) and of all that they import."""
    return digest_of(sources_of(roots))


def sources_of(roots: Iterable[str]) -> dict[str, str]:
    """Module to the digest of its code."""
    waiting, found = set(roots), dict[str, str]()
    packages = {"medpfl", *(name.partition(".")[0] for name in waiting)}
    while waiting:
        name = waiting.pop()
        if name not in found and name not in PAGES:
            found[name], imported = _module(name)
            waiting |= {_defining(*pair) for pair in imported if pair[0].partition(".")[0] in packages}
    return found


@functools.cache
def _module(name: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Digest of a module's code, and what it imports: pairs of a module and a name in it ("": the module itself)."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return "", frozenset()  # compiled, or a folder without code
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    imported: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, spec.parent) if node.level else relative
            imported |= {(module, alias.name) for alias in node.names}
    return digest_of(ast.unparse(_NoDocstrings().visit(tree))), frozenset(imported)


class _NoDocstrings(ast.NodeTransformer):
    """Drops statements that are a constant; the tree is for reading, not for running."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


@functools.cache
def _defining(module: str, name: str) -> str:
    """The module in which ``from module import name`` finds the code."""
    spec = importlib.util.find_spec(module)
    if not name or spec is None or spec.submodule_search_locations is None:
        return module
    if importlib.util.find_spec(f"{module}.{name}"):
        return f"{module}.{name}"
    return getattr(getattr(importlib.import_module(module), name, None), "__module__", None) or module
