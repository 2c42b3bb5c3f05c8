# SPDX-License-Identifier: Apache-2.0
"""Components as configuration and back: {"path": class, "args": {...}}, the form FLARE uses in its job files."""

import dataclasses
import importlib
import inspect
import os
import pkgutil
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import JsonValue

from medpfl.core.checked import Checked, hint_of
from medpfl.core.errors import ConfigError, meant, shown

Built = TypeVar("Built")
Spec = dict[str, JsonValue]
"""A component's configuration: its class and arguments."""
_DEEPEST = 50
"""Points in a class's name: Python imports a package inside a package inside ... by calling itself."""
PACKAGES = "MEDPFL_PACKAGES"
"""Environment variable: other packages, separated by commas, whose classes jobs and model files may name here."""
_UNIMPORTABLE = (ImportError, SyntaxError, AttributeError, ValueError, TypeError)
"""What Python raises where a module or a class cannot be had; the last two of names such as "a..B" and "..a.B"."""
_failed: dict[str, str] = {}
"""Why the modules that ``import_named`` was to import could not be."""


def spec_of(component: object) -> Spec:
    """The configuration that builds an equal component: a dataclass of plain values and other components, or a class
    with a method ``arguments`` that returns such values by name. As JSON: tuples are lists."""
    return {"path": class_name(type(component)), "args": _arguments(component)}


def class_name(kind: type) -> str:
    """The full name by which configuration names a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_in_a_module(path: str) -> bool:
    """Whether another process can import the class: it is not of a script, a notebook's cell or a function."""
    return not path.startswith("__main__.") and "<locals>" not in path


def _arguments(component: Any) -> Spec:
    if hasattr(component, "arguments"):
        given = component.arguments()
    elif not dataclasses.is_dataclass(component):
        raise _no_dataclass(component)
    else:
        given = {field.name: getattr(component, field.name) for field in dataclasses.fields(component) if field.init}
    return {name: _argument(value) for name, value in given.items()}


def _no_dataclass(component: object) -> ConfigError:
    return ConfigError(f"{type(component).__name__} must be a frozen dataclass (@dataclass(frozen=True)), and is none")


def _argument(value: Any) -> JsonValue:
    if dataclasses.is_dataclass(value) or hasattr(value, "arguments"):
        return spec_of(value)
    if isinstance(value, (list, tuple)):
        return [_argument(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _argument(one) for name, one in value.items()}
    if isinstance(value, Checked):
        raise _no_dataclass(value)
    plain: JsonValue = value
    return plain


def class_paths(config: Any) -> Iterator[str]:
    """Every class that a configuration names, however deep."""
    if isinstance(config, dict) and isinstance(config.get("path"), str):
        yield config["path"]
    for inner in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        yield from class_paths(inner)


def find_class(path: Any, where: str) -> type:
    """The class that a job or a model's file names.

    Importing a module runs it, so nothing of another package is imported because a file names it: its class is taken
    where the package is in use already, or where this machine's user names it in ``MEDPFL_PACKAGES``.

    Raises:
        ConfigError: no such module or class, it is not a class, or it is of a package that is not to be imported.
    """
    if not isinstance(path, str) or not 1 <= path.count(".") <= _DEEPEST:
        raise ConfigError(f"{where}: 'path' must be a full class name, got {shown(path)}")
    module, _, name = path.rpartition(".")
    if not _may_import(module):
        if module not in sys.modules and module in _failed:
            raise ConfigError(f"{where}: there is no class '{path}': {_failed[module]}")
        if module not in sys.modules:
            package = module.partition(".")[0]
            raise ConfigError(
                f"{where}: there is no class '{path}' here: the package '{package}' is not MedPFL's, and {PACKAGES} "
                "does not name it, so nothing of it is imported"
            )
        if name not in vars(sys.modules[module]):
            raise ConfigError(f"{where}: there is no class '{path}'")
        found = vars(sys.modules[module])[name]
    else:
        try:
            found = getattr(importlib.import_module(module), name)
        except _UNIMPORTABLE as error:
            told = _moved(module, name) or f"{_reason_of(error)}{_near(module, name)}"
            raise ConfigError(f"{where}: there is no class '{path}': {told}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{where}: '{path}' is not a class")
    return found


def _may_import(module: str) -> bool:
    return module.partition(".")[0] == __package__ or is_named(module)


def is_named(path: str) -> bool:
    """Whether a module or class is of a package that this machine's user names in ``MEDPFL_PACKAGES``."""
    return path.partition(".")[0] in {name.strip() for name in os.environ.get(PACKAGES, "").split(",")}


def import_named(config: Any) -> None:
    """Import the modules of all classes that a file of this machine's own user names: a comparison, a site file.

    What cannot be imported is left to ``find_class`` to name.
    """
    for path in class_paths(config):
        module = path.rpartition(".")[0]
        try:
            importlib.import_module(module)
        except _UNIMPORTABLE as error:
            _failed[module] = _reason_of(error)


def _reason_of(error: Exception) -> str:
    """What Python says, without folders of this machine: a server is told it, too."""
    path = getattr(error, "path", None)  # an ImportError's: of the module that lacks a name, or cannot be loaded
    return str(error).replace(path, os.path.basename(path)) if path else str(error)


def _moved(module: str, name: str) -> str | None:
    """What a class of this package is called, where it lies beside or inside the module that its name says."""
    for package in (module.rpartition(".")[0], module):
        if not package.startswith(f"{__package__}."):
            continue  # nothing of somebody else's is imported because a job named something near it
        try:
            folder = importlib.import_module(package)
            for near in pkgutil.iter_modules(getattr(folder, "__path__", ()), f"{package}."):
                kind = getattr(importlib.import_module(near.name), name, None)
                if isinstance(kind, type) and kind.__module__ == near.name:
                    return f"it is called '{near.name}.{name}' now; write that instead"
        except ImportError:
            continue  # the sentence says what could not be imported in the first place
    return None


def _near(module: str, name: str) -> str:
    """What of the module's own classes was perhaps meant."""
    kinds = vars(sys.modules[module]) if module in sys.modules else {}
    return meant(name, [known for known, kind in kinds.items() if getattr(kind, "__module__", None) == module])


def build(config: Any, base: type, where: str) -> Any:
    """Build a component from its configuration; ``Checked`` compares every argument with its type hint.

    Args:
        config: {"path": ..., "args": {...}}; arguments that are such mappings themselves are built first.
        base: class it must be a subclass of.
        where: place in the job, for messages.

    Raises:
        ConfigError: one sentence with the place, the key, expected and got.
    """
    if not isinstance(config, dict) or "path" not in config:
        raise ConfigError(f"{where}: expected {{'path': class, 'args': {{...}}}}, got {shown(config)}")
    extra = set(config) - {"id", "path", "args"}
    if extra:
        raise ConfigError(f"{where}: unknown key '{sorted(extra)[0]}'; a component has 'path' and 'args'")
    kind = find_class(config["path"], where)
    if not issubclass(kind, base):
        raise ConfigError(f"{where}: '{config['path']}' is no {base.__name__}")
    if inspect.isabstract(kind):
        raise ConfigError(f"{where}: '{config['path']}' is abstract; name one that implements it")
    return construct(kind, config.get("args", {}), where)


def construct(kind: type[Built], args: Any, where: str) -> Built:
    """A ``Checked`` class's instance, of arguments as they stand in a job.

    Raises:
        ConfigError: with the place, the argument, expected and got.
    """
    if not isinstance(args, dict):
        raise ConfigError(f"{where}: 'args' must be a mapping, got {shown(args)}")
    built = {name: _argument_of(kind, name, value, where) for name, value in args.items()}
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _argument_of(kind: type, name: str, value: Any, where: str) -> Any:
    """The value, or the component that it describes."""
    if isinstance(value, dict) and "path" in value:
        hint = hint_of(kind, name)
        for base in typing.get_args(hint) or (hint,):  # a component, or perhaps None
            if isinstance(base, type) and issubclass(base, Checked):
                return build(value, base, f"{where}.{name}")
    return value
