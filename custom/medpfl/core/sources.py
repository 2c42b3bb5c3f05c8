# SPDX-License-Identifier: Apache-2.0
"""Which source files a result depends on: a changed one makes another run, or prepares its cases anew.

They are the modules that compute (the round loop, those of a run's components) and what these import, directly or
not, within MedPFL, the components' own packages and what lies in the same folder as these, unless it is one into which
packages are installed. A package that only passes a name on is looked through to the module that defines it, so that a
new method or server component beside the old ones changes nothing. Comments, docstrings and layout do not count.
"""

import ast
import functools
import importlib
import importlib.util
import os
import sys
import tokenize
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType

from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError

PAGES = {"medpfl.results.report", "medpfl.deployed.card"}
"""They write what people read; no number comes from them."""
_TOLD = {"medpfl", "pydantic", *sys.stdlib_module_names}
"""Packages whose version says enough of the classes that others derive from them."""


def source_digest(roots: Iterable[str]) -> str:
    """One digest over the code of ``roots`` (module names) and of all that they import."""
    return digest_of(sources_of(roots))


def sources_of(roots: Iterable[str]) -> dict[str, str]:
    """Module to the digest of its code."""
    roots = set(roots)
    packages = {"medpfl", *map(_package, roots)}
    return _followed(roots, packages, _module, {*map(_folder, packages - {"medpfl"})} - {None})


def foreign_code(paths: Iterable[str]) -> dict[str, str]:
    """The code, as it lies on disk now, of classes of other packages than MedPFL, and of what their modules import of
    these packages and of the folder in which these lie: module to digest.

    Args:
        paths: names of classes. Those of MedPFL are left out: its version is told.
    """
    _defining.cache_clear()
    roots = {path.rpartition(".")[0] for path in paths if _package(path) != "medpfl"}
    packages = set(map(_package, roots))
    return _followed(roots, packages, _code, {*map(_folder, packages)} - {None})


def code_here(paths: Iterable[str]) -> dict[str, str]:
    """As ``foreign_code``, of classes that this process runs.

    Raises:
        ConfigError: a module is another one on disk than when it was looked at before in this process, which goes on
            with what it imported. A result would be told to be of code that had no part in it.
    """
    found = foreign_code(paths)
    for name, digest in found.items():
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded else None
        before = _running.get(name)
        if before is not None and spec is not None and before[0] is spec and before[1] != digest:
            raise ConfigError(
                f"{name} has changed since it was imported here, and what runs here is as it was: start Python again "
                "(in a notebook, restart the kernel)"
            )
        _running[name] = spec, digest
    return found


def code_of(kind: type) -> dict[str, str]:
    """As ``foreign_code`` of one class, with the modules of the classes that it derives from, of whichever package.

    Raises:
        OSError: one has no file, as where it was written in a notebook.
    """
    _defining.cache_clear()
    roots = {each.__module__ for each in kind.__mro__ if _package(each.__module__) not in _TOLD}
    packages = {_package(kind.__module__)} - _TOLD
    found = _followed(roots, packages, _code, {*map(_folder, packages)} - {None})
    if not all(found[root] for root in roots):
        raise FileNotFoundError(f"{kind.__qualname__} has no file")
    return found


def _package(name: str) -> str:
    return name.partition(".")[0]


def _folder(package: str) -> Path | None:
    """The folder of one's own in which a module or package lies; None: it is installed beside those of others."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = spec and (spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else []))
    folder = Path(next(iter(places))).parent if places else None
    return None if folder is None or any(folder.glob("*.dist-info")) else folder


def _followed(
    roots: set[str], packages: set[str], read: "Callable[[str], _Code]", folders: Set[Path | None] = frozenset()
) -> dict[str, str]:
    """The digests of ``roots`` and of all modules of ``packages``, or of what lies in ``folders``, that they import,
    directly or not. MedPFL's own code is looked at only where it is one of ``packages``."""
    waiting, found = set(roots), dict[str, str]()
    own = functools.cache(
        lambda package: package in packages or (bool(folders) and package != "medpfl" and _folder(package) in folders)
    )
    while waiting:
        name = waiting.pop()
        if name not in found and name not in PAGES:
            code = read(name)
            found[name] = code.digest
            waiting |= {_defining(*pair) for pair in code.imported if own(_package(pair[0]))}
    return found


@dataclass(frozen=True)
class _Code:
    """A module's code as it was read: its digest, and what it imports, pairs of a module and a name in it ("": the
    module itself); ``spec``: another one after the module was loaded again."""

    digest: str
    imported: frozenset[tuple[str, str]]
    spec: ModuleSpec | None
    written: tuple[int, int] | None


_known: dict[str, _Code] = {}
_running: dict[str, tuple[ModuleSpec | None, str]] = {}
"""Module to how it was loaded when ``code_here`` looked at it, and the digest of its code."""


def look_again() -> None:
    """Before runs are planned, in a process that may have planned others: what has changed on disk is read anew.

    Raises:
        ConfigError: a module has changed that was imported before. Its classes are the old ones here, and the new ones
            in every run's process.
    """
    _defining.cache_clear()
    for name, code in list(_known.items()):
        loaded = sys.modules.get(name)
        same = loaded is None or loaded.__spec__ is code.spec
        if same and _written(code.spec) == code.written:
            continue
        if same and loaded is not None and _code(name).digest != code.digest:
            raise ConfigError(
                f"{name} has changed since it was imported here, and every run's process would import it as it is now: "
                "start Python again (in a notebook, restart the kernel)"
            )
        del _known[name]


def _module(name: str) -> _Code:
    if name not in _known:
        _known[name] = _code(name)
    return _known[name]


def _written(spec: ModuleSpec | None) -> tuple[int, int] | None:
    """When a module's file was written, and its size; None: it is not there, or there is none."""
    try:
        found = os.stat(spec.origin) if spec and spec.origin else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if found else None


def _code(name: str) -> _Code:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # its package is not installed; of __main__, as in a notebook
        spec = None
    written = _written(spec)
    if spec is None or spec.origin is None or written is None:
        return _Code("", frozenset(), spec, written)  # built in, gone, or a folder without code
    if not spec.origin.endswith(".py"):  # compiled
        return _Code(digest_of(Path(spec.origin).read_bytes().hex()), frozenset(), spec, written)
    try:
        with tokenize.open(spec.origin) as file:  # with or without a byte order mark, in the declared encoding
            tree = ast.parse(file.read())
    except (SyntaxError, UnicodeDecodeError):  # as it is being written, after it was imported
        return _Code(digest_of(Path(spec.origin).read_bytes().hex()), frozenset(), spec, written)
    imported: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(relative, spec.parent) if node.level else relative
            imported |= {(module, alias.name) for alias in node.names}
    return _Code(digest_of(ast.unparse(_NoDocstrings().visit(tree))), frozenset(imported), spec, written)


class _NoDocstrings(ast.NodeTransformer):
    """Drops statements that are a constant; the tree is for reading, not for running."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


@functools.cache
def _defining(module: str, name: str) -> str:
    """The module in which ``from module import name`` finds the code; ``module``, if it is none that can be imported
    here, as what a package does without (try, except ImportError)."""
    try:
        spec = importlib.util.find_spec(module)
        if not name or spec is None or spec.submodule_search_locations is None:
            return module
        if importlib.util.find_spec(f"{module}.{name}"):
            return f"{module}.{name}"
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return module
    # An object tells the module of its class, not the one that makes it.
    return found.__module__ if isinstance(found, type | FunctionType) else module
