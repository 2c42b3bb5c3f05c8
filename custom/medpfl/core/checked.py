# SPDX-License-Identifier: Apache-2.0
"""Components whose arguments are checked against their type hints when they are built, whoever builds them."""

import dataclasses
import inspect
import math
import sys
import types
import typing
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from medpfl.core.errors import ConfigError, meant, shown


class CheckedType(ABCMeta):
    """Checks arguments before ``__init__`` sees them."""

    gone: Mapping[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        names = [name for name, one in _parameters(cls).items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        positional = [_checked(cls, name, value) for name, value in zip(names, args, strict=False)]
        named = {name: _checked(cls, name, value) for name, value in kwargs.items()}
        _refuse_missing(cls, {*names[: len(args)], *kwargs})
        return super().__call__(*positional, *args[len(names) :], **named)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What ``inspect.signature`` says: the arguments of ``__init__``, not those of ``__call__``."""
        return inspect.Signature(list(_parameters(cls).values()))


class Checked(metaclass=CheckedType):
    """What a job names by its class and arguments: a dataclass, or a class whose ``__init__`` has type hints.

    Arguments are those that JSON can hold, and other components: whole numbers pass for numbers and become them, lists
    pass for tuples and become them; a string is never taken for a number. An unknown, missing or wrong argument raises
    a ``ConfigError`` of one sentence.
    """

    gone: ClassVar[Mapping[str, str]] = {}
    """Arguments that there were once, to what a job that still has them must change."""


def hint_of(kind: type, name: str) -> Any:
    """The type of an argument; None if there is no such argument."""
    return _hints(kind).get(name, _further(kind))


@cache
def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    if kind.__init__ is object.__init__:  # type: ignore[misc]
        return {}
    _, *arguments = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return {one.name: one for one in arguments}


@cache
def _types(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind if dataclasses.is_dataclass(kind) else kind.__init__)  # type: ignore[misc]


@cache
def _hints(kind: type) -> dict[str, object]:
    """Argument to its type; a ``**`` argument is left out."""
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: _types(kind).get(name, Any) for name, one in _parameters(kind).items() if one.kind not in rest}


@cache
def _further(kind: type) -> Any:
    """The type of arguments of any other name; None if there may be none."""
    for one in _parameters(kind).values():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            return _types(kind).get(one.name, Any)
    return None


def _checked(kind: "CheckedType", name: str, value: Any) -> Any:
    hint = hint_of(kind, name)
    if hint is None:
        if name in kind.gone:
            raise ConfigError(f"{kind.__name__} has no argument '{name}' any more: {kind.gone[name]}")
        near = meant(name, _hints(kind))
        known = ", ".join(_hints(kind)) or "none"
        raise ConfigError(f"unknown argument '{name}' of {kind.__name__}; it has: {known}{near}")
    try:
        return _fitted(value, hint)
    except _Misfit as error:
        near = meant(value, typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else ""
        raise ConfigError(f"argument '{name}' of {kind.__name__} must be {error}, got {shown(value)}{near}") from None


def _refuse_missing(kind: type, given: set[str]) -> None:
    for name in _hints(kind):
        if name not in given and _parameters(kind)[name].default is inspect.Parameter.empty:
            raise ConfigError(f"argument '{name}' of {kind.__name__} is missing")


class _Misfit(Exception):
    """A value is not of its type; the text says what was expected."""


def _fitted(value: Any, hint: Any) -> Any:
    """The value as the type that the hint says."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, hint, inner)
    if origin is typing.Literal:
        fits = any(type(value) is type(one) and value == one for one in inner)
    elif origin is tuple:
        return _as_tuple(value, hint, inner)
    elif origin in (list, Sequence):
        return _as_list(value, hint, inner[0])
    elif origin in (dict, Mapping):
        return _as_mapping(value, hint, inner[1])
    elif hint is float:
        return _as_number(value)
    elif hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif hint is None or isinstance(hint, type):
        fits = isinstance(value, hint or type(None))
    else:  # a type that no job can write down (a function, say) is the caller's affair
        return value
    if not fits:
        raise _Misfit(_named(hint))
    return value


def _as_number(value: Any) -> float:
    if isinstance(value, float):
        if not math.isfinite(value):  # YAML can write it; no argument means anything then
            raise _Misfit("a finite number")
        return value
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > sys.float_info.max:
        raise _Misfit(_named(float))
    return float(value)


def _one_of(value: Any, hint: Any, hints: tuple[Any, ...]) -> Any:
    for one in hints:
        try:
            return _fitted(value, one)
        except _Misfit:
            continue
    raise _Misfit(_named(hint))


def _as_tuple(value: Any, hint: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _Misfit(_named(hint))
    entries = (hints[0],) * len(value) if hints[-1] is Ellipsis else hints
    try:
        return tuple(_fitted(one, entry) for one, entry in zip(value, entries, strict=True))
    except (_Misfit, ValueError):
        raise _Misfit(_named(hint)) from None


def _as_list(value: Any, hint: Any, entry: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _Misfit(_named(hint))
    try:
        fitted = [_fitted(one, entry) for one in value]
    except _Misfit:
        raise _Misfit(_named(hint)) from None
    unchanged = isinstance(value, list) and all(new is old for new, old in zip(fitted, value, strict=True))
    return value if unchanged else fitted


def _as_mapping(value: Any, hint: Any, entry: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _Misfit(_named(hint))
    try:
        fitted = {key: _fitted(one, entry) for key, one in value.items()}
    except _Misfit:
        raise _Misfit(_named(hint)) from None
    return value if all(fitted[key] is value[key] for key in value) else fitted


_ONE = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
_MANY = {int: "whole numbers", float: "numbers", bool: "true or false", str: "strings"}


def _named(hint: Any) -> str:
    """What is expected, for a sentence."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(one) for one in inner)
    if origin is typing.Literal:
        *first, last = [repr(one) for one in inner]
        return f"{', '.join(first)} or {last}" if first else last
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)} {_plural(inner[0])}"
    if origin in (tuple, list, Sequence):
        return f"a list of {_plural(inner[0])}"
    if origin in (dict, Mapping):
        return f"a mapping of names to {_plural(inner[1])}"
    if hint in _ONE:
        return _ONE[hint]
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _plural(hint: Any) -> str:
    return _MANY.get(hint, f"entries that are each {_named(hint)}")
