# SPDX-License-Identifier: Apache-2.0
"""What the entries of an input mean, said in a form that hospitals can compare.

Two tables of equal width train together without an error whatever their columns hold, and the result is worthless.
"""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from medpfl.core.errors import printable
from medpfl.data.declared import canonical

LONGEST = 200
"""Characters of one description."""

Meaning = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=LONGEST), AfterValidator(printable)]],
    Field(max_length=100_000),
]
"""One description an entry, in their order; see ``Preparation.meaning``."""


def described(column: str, kind: str | Sequence[str | float], unit: str | None = None) -> str:
    """A feature in words: "age: number in years", "sex: m or f"; what is too long for a message by its SHA-256."""
    if isinstance(kind, str):
        told = f"{column}: {kind}{f' in {unit}' if unit else ''}"
    else:
        told = f"{column}: {' or '.join(canonical(category).removesuffix('.0') for category in kind)}"
    if len(told) <= LONGEST and told.isprintable():
        return told
    short = "".join(letter if letter.isprintable() else "?" for letter in column[:100])
    return f"{short}: of SHA-256 {hashlib.sha256(told.encode()).hexdigest()[:12]}"


def other_inputs(mine: Sequence[str], here: str, theirs: Sequence[str], there: str) -> str | None:
    """A sentence on the first entry that means something else; None if all mean the same.

    Args:
        here, there: whose they are: "anna's", "the model's".
    """
    pairs = enumerate(zip_longest(mine, theirs, fillvalue="nothing"), start=1)
    for number, (got, expected) in pairs:
        if got != expected:
            told = f"{here} input {number} is '{got}', {there} '{expected}'"
            if sorted(mine) == sorted(theirs):
                return f"{told}: the same features stand in another order in the site file"
            return f"{told}: the features, their categories and units must agree ('rename' gives columns other names)"
    return None
