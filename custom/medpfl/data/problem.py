# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file that a person wrote, in a sentence."""

from typing import get_args

from pydantic import BaseModel, ValidationError

from medpfl.core.errors import meant


def first_problem(error: ValidationError, kind: type[BaseModel], before: tuple[str, ...] = ()) -> str:
    """Pydantic's first problem as a sentence: the key, what is expected, what is there, and what may be meant."""
    problem = error.errors()[0]
    place = ".".join(str(p) for p in (*before, *problem["loc"]) if p != "[key]") or "the file"
    got = problem.get("input")
    shown = "" if isinstance(got, dict | BaseModel) or problem["type"] == "missing" else f", got {got!r}"
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{place}'{meant(problem['loc'][-1], _keys(kind, problem['loc'][:-1]))}"
    if problem["type"] == "missing":
        return f"key '{place}' is missing"
    if problem["type"] == "too_short":
        bounds = problem["ctx"]
        return f"'{place}': expected at least {bounds['min_length']}, got {bounds['actual_length'] or 'none'}"
    message = problem["msg"].removeprefix("Value error, ").split(", unable")[0]
    if message[1:2].islower():
        message = message[0].lower() + message[1:]
    return f"'{place}': {message}{shown}"


def _keys(kind: type[BaseModel], place: tuple[str | int, ...]) -> list[str]:
    """The keys that there are at a place of a declaration."""
    for part in place:
        if isinstance(part, int):  # an entry of a list
            continue
        if part not in kind.model_fields:
            return []
        field = kind.model_fields[part]
        inner = [field.annotation, *get_args(field.annotation)]
        inner += [deeper for one in inner for deeper in get_args(one)]
        found = next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if found is None:
            return []
        kind = found
    return list(kind.model_fields)
