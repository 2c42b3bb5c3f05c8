# SPDX-License-Identifier: Apache-2.0
"""What looking at the data cannot tell: answered by flags, by guesses, or by asking."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medpfl.core.errors import SiteFileError
from medpfl.data.numbers import as_number, beyond_double
from medpfl.data.schema import Schema

Value = str | int | float


@dataclass(frozen=True)
class Entry:
    """A key of the declared dataset, with a comment for the one who edits it."""

    key: str
    value: Any
    comment: str = ""


@dataclass(frozen=True)
class Answers:
    """Flags of the command line and a way to ask.

    Attributes:
        given: flag (without dashes) to its value; absent if not given.
        classes: class name to its values, from --class.
        prompt: asks a question with a default ("" if there is none) and returns the answer; None: do not ask, take
            the guesses.
        schema: what the hospitals agreed on; None: nothing is known of it.
        columns: agreed name of a feature to this hospital's column, from --column.
        codes: agreed name of a feature to this hospital's values and the categories they mean, from --code.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    prompt: Callable[[str, str], str] | None = None
    schema: Schema | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def get(self, flag: str, question: str, guess: str | None = None, allowed: Sequence[str] | None = None) -> str:
        """The flag's value, else the answer to the question, else the guess.

        Raises:
            SiteFileError: it is not among the allowed; or there is no flag, no guess and nobody to ask.
        """
        answer = self.given.get(flag)
        if answer is None and self.prompt:
            answer = self.prompt(question, guess or "")
        elif answer is None:
            answer = guess
        options = f" ({', '.join(allowed)})" if allowed else ""
        if not answer:
            raise SiteFileError(f"--{flag} is needed: {question}{options}")
        if allowed is not None and answer not in allowed:
            raise SiteFileError(f"--{flag}: '{answer}' is not there; expected one of: {', '.join(allowed)}")
        return answer

    def class_values(self, found: Sequence[Value], names: Sequence[str], what: str) -> dict[str, list[Value]]:
        """Class names to values: those of --class, else one class a value, named as guessed or answered."""
        if self.classes:
            declared = {str(value) for values in self.classes.values() for value in values}
            if lacking := [repr(value) for value in found if str(value) not in declared]:
                values = f"value {lacking[0]}" if len(lacking) == 1 else f"values {', '.join(lacking)}"
                raise SiteFileError(f"--class: {what} holds the {values}, which no --class mentions")
            return self._in_order({name: list(values) for name, values in self.classes.items()}, what)
        if self.schema:
            return self._in_order(self._agreed(found, names, what, self.schema.classes), what)
        if self.prompt:
            names = [self.prompt(f"Name of the class with the value {v}", n) for v, n in zip(found, names, strict=True)]
        if len(set(names)) != len(names):
            raise SiteFileError(f"two classes have one name: {', '.join(names)}")
        return {name: [value] for name, value in zip(names, found, strict=True)}

    def _agreed(
        self, found: Sequence[Value], names: Sequence[str], what: str, classes: Sequence[str]
    ) -> dict[str, list[Value]]:
        """Values to the schema's classes: by equal names, or as answered."""
        by_name = {name.casefold(): name for name in classes}
        values: dict[str, list[Value]] = {}
        for value, guess in zip(found, names, strict=True):
            name = by_name.get(str(value).casefold()) or by_name.get(guess.casefold())
            if name is None and self.prompt:
                name = by_name.get(self.prompt(f"Which class is {value!r}: {', '.join(classes)}?", "").casefold())
            if name is None:
                raise SiteFileError(
                    f"--class is needed: {what} holds the value {value!r}; say which of the schema's classes it is, as "
                    f"in --class {classes[0]}={value} (the classes are {', '.join(classes)})"
                )
            values.setdefault(name, []).append(value)
        return values

    def _in_order(self, values: dict[str, list[Value]], what: str) -> dict[str, list[Value]]:
        """In the schema's order, if there is one; every class has its values."""
        if self.schema is None:
            return values
        for name in self.schema.classes:
            if name not in values:
                raise SiteFileError(
                    f"{what} has no value for the class '{name}' of the schema; name the value that it would have with "
                    f"--class {name}=VALUE"
                )
        return {name: values[name] for name in self.schema.classes}


def as_value(text: str) -> Value:
    """3 for "3" and "3.0", 0.5 for "0.5", else the text ("nan" too)."""
    number = as_number(text)
    if number is None or not math.isfinite(number):
        return text
    if (whole := beyond_double(text, number)) is not None:
        return whole
    return int(number) if number.is_integer() else number


def parse_classes(flags: Sequence[str]) -> dict[str, list[Value]]:
    """``NAME=VALUE[,VALUE...]`` of each --class.

    Raises:
        SiteFileError: one is not of that form.
    """
    classes: dict[str, list[Value]] = {}
    for flag in flags:
        name, equals, values = flag.partition("=")
        if not name.strip() or not equals or not values.strip() or name.strip() in classes:
            raise SiteFileError(f"--class: expected NAME=VALUE or NAME=VALUE,VALUE, each name once, got '{flag}'")
        classes[name.strip()] = [as_value(value.strip()) for value in values.split(",")]
    return classes
