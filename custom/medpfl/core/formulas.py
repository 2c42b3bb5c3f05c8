# SPDX-License-Identifier: Apache-2.0
"""Text in a CSV file that a spreadsheet would take for a formula."""

_SIGNS = tuple("=+-@＝＋－＠")  # the wide ones, of East Asian keyboards, begin formulas too


def no_formula(text: str) -> str:
    """The text, with an apostrophe before it where it would be a formula (OWASP's advice on "CSV injection")."""
    return f"'{text}" if text.lstrip()[:1] in _SIGNS or text[:1] in ("\t", "\r", "\n") else text


def as_it_was(text: str) -> str:
    """What ``no_formula`` was given."""
    return text[1:] if text.startswith("'") and no_formula(text[1:]) == text else text
