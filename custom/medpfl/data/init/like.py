# SPDX-License-Identifier: Apache-2.0
"""A hospital's own columns and codes, mapped onto the schema that the hospitals agreed on."""

import difflib
import re
from collections.abc import Mapping, Sequence

from medpfl.core.errors import SiteFileError
from medpfl.data.declared import canonical
from medpfl.data.init.answers import Answers, Value
from medpfl.data.schema import Schema


def like(answers: Answers, schema: Schema) -> Answers:
    """The answers that a schema gives: the dataset's name, and which classes there are.

    Raises:
        SiteFileError: a flag says otherwise, or what is to be predicted is nothing that is proposed.
    """
    if schema.answer or not (schema.classes or "value" in schema.declared):
        key = schema.answer or "value"
        what = {"several": "several labels", "survival": "a time until an event"}.get(key, "a number of such data")
        raise SiteFileError(
            f"the schema has {what} to predict, which 'site init' does not propose: let it propose a site file without "
            f"--like, write '{key}' in place of what it predicts, and compare it with the schema by 'medpfl check-data "
            "SITE_FILE --schema SCHEMA'"
        )
    if answers.given.get("dataset", schema.dataset) != schema.dataset:
        raise SiteFileError(f"--dataset: the schema describes '{schema.dataset}', got '{answers.given['dataset']}'")
    if answers.classes and not schema.classes:
        raise SiteFileError(
            f"--class: the schema has no classes, for a number is to be predicted, got '{next(iter(answers.classes))}'"
        )
    for name in answers.classes:
        if name not in schema.classes:
            meant = difflib.get_close_matches(name, schema.classes, 1)
            hint = f"; did you mean '{meant[0]}'?" if meant else ""
            raise SiteFileError(f"--class: the schema's classes are {', '.join(schema.classes)}, got '{name}'{hint}")
    given = {**answers.given, "dataset": schema.dataset}
    return Answers(given, answers.classes, answers.prompt, schema, answers.columns, answers.codes)


def own_columns(features: Sequence[str], columns: Sequence[str], answers: Answers) -> dict[str, str]:
    """Agreed name of a feature to this table's column: of the same name but for case and punctuation, or as answered.

    Raises:
        SiteFileError: a feature has no column and nobody says which; or a --column names what is not there.
    """
    by_form = {_form(column): column for column in columns}
    for name in answers.columns:
        if name not in features:
            raise SiteFileError(f"--column: the schema has no feature '{name}'; it has: {', '.join(features)}")
    found: dict[str, str] = {}
    lacking: list[str] = []
    for name in features:
        column = answers.columns.get(name) or by_form.get(_form(name))
        if column is None and answers.prompt:
            guess = difflib.get_close_matches(name, columns, 1)
            column = answers.prompt(f"Which column is '{name}'?", guess[0] if guess else "")
        if column is None:
            lacking.append(name)
        elif column not in columns:
            raise SiteFileError(f"'{name}': there is no column '{column}'; the table has: {', '.join(columns)}")
        else:
            found[name] = column
    if lacking:
        raise SiteFileError(
            f"no column is called {' or '.join(repr(name) for name in lacking)}, which the schema has; say which it is "
            f"with --column {lacking[0]}=COLUMN (the table has: {', '.join(columns)})"
        )
    return found


def own_codes(name: str, categories: Sequence[Value], cells: Sequence[str], answers: Answers) -> dict[str, Value]:
    """This table's value to the agreed category, for values that are not the category itself.

    Raises:
        SiteFileError: a value is no category and nobody says which.
    """
    agreed = {canonical(category): category for category in categories}
    by_form = {_form(str(category)): category for category in categories}
    said: Mapping[str, str] = answers.codes.get(name, {})
    found: dict[str, Value] = {}
    for cell in sorted(set(cells)):
        if canonical(cell) in agreed:
            continue
        answer: str | Value | None = said.get(cell) or by_form.get(_form(cell))
        if answer is None and answers.prompt:
            answer = answers.prompt(f"Column '{name}': which of {_listed(categories)} is '{cell}'?", "")
        if answer is None or canonical(answer) not in agreed:
            raise SiteFileError(
                f"column '{name}' holds '{cell}', which is none of the schema's categories ({_listed(categories)}); "
                f"say which it is with --code {name}:{cell}=CATEGORY"
            )
        found[cell] = agreed[canonical(answer)]
    return found


def parse_columns(flags: Sequence[str]) -> dict[str, str]:
    """``NAME=COLUMN`` of each --column.

    Raises:
        SiteFileError: one is not of that form.
    """
    found = {}
    for flag in flags:
        name, equals, column = flag.partition("=")
        if not name or not equals or not column:
            raise SiteFileError(f"--column: expected NAME=COLUMN, got '{flag}'")
        found[name] = column
    return found


def parse_codes(flags: Sequence[str]) -> dict[str, dict[str, str]]:
    """``NAME:VALUE=CATEGORY`` of each --code.

    Raises:
        SiteFileError: one is not of that form.
    """
    found: dict[str, dict[str, str]] = {}
    for flag in flags:
        name, colon, rest = flag.partition(":")
        value, equals, category = rest.partition("=")
        if not name or not colon or not value or not equals or not category:
            raise SiteFileError(f"--code: expected NAME:VALUE=CATEGORY, got '{flag}'")
        found.setdefault(name, {})[value] = category
    return found


def _form(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def _listed(values: Sequence[Value]) -> str:
    return ", ".join(map(str, values))
