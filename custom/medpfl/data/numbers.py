# SPDX-License-Identifier: Apache-2.0
"""Numbers as text files hold them: with a decimal point, or with a comma where a site file says so."""

import math
import re
from collections.abc import Callable, Collection, Iterable

_WITH_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.IGNORECASE)
_WITH_POINT = re.compile(r"[+-]?(\d*\.\d+|\d+\.)(e[+-]?\d+)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
_BELOW_A_THOUSAND = re.compile(r"[+-]?\d{1,3}")
_REFUSED = "\n."
"""At the end of a cell that would read as a number with a point, where the decimal sign is a comma: "1.234" may be a
thousand there. With it, it is no number."""


def for_people(value: float) -> str:
    """A number on a page: four digits, and of large ones all before the point: "0.01235", "234567"."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def in_full(value: float) -> str:
    """A number with all its digits, for who computes with it or looks for it: "6" of 6.0, "1234567" of 1234567.0."""
    return repr(value).removesuffix(".0")


def has_comma(cell: str) -> bool:
    """Whether it is a number with a decimal comma."""
    return _WITH_COMMA.fullmatch(cell) is not None


def has_point(cell: str) -> bool:
    """Whether it is a number with a decimal point."""
    return _WITH_POINT.fullmatch(cell) is not None


def like_thousands(cells: Iterable[str]) -> list[str]:
    """The numbers of a column whose sign may stand after thousands and not before decimal places, as in 1,096 beside
    219: all that have a sign have three digits behind it, and all others are whole and below a thousand. None of them
    where the column is not like that; measurements are not."""
    signed = []
    whole = False
    for cell in cells:
        if _THOUSANDS.fullmatch(cell):
            signed.append(cell)
        elif _BELOW_A_THOUSAND.fullmatch(cell):
            whole = True
        else:
            return []
    return signed if whole else []


def with_point(cell: str, number: bool = False) -> str:
    """A cell of a file whose decimal sign is a comma, as other files would hold it.

    Args:
        number: only numbers belong there, so that one with a point is none.
    """
    if "," in cell and has_comma(cell):
        return cell.replace(",", ".")
    return cell + _REFUSED if number and "." in cell and has_point(cell) else cell


def not_known(declared: Collection[str], commas: bool = False) -> Callable[[str], bool]:
    """Whether a cell is one of the declared ones, of which numbers are compared as numbers: where "-9" is declared,
    pandas writes -9.0 into a column that has a missing value or a fraction.

    Args:
        commas: the file's decimal sign is a comma.
    """
    texts = frozenset(declared)
    numbers = frozenset(number for text in texts if (number := as_number(text)) is not None)

    def known(cell: str) -> bool:
        return cell in texts or (bool(numbers) and as_number(with_point(cell) if commas else cell) in numbers)

    return known


def as_number(text: str) -> float | None:
    """A text as a number; None where it is none, as is 1_5, of which Python would make 15."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")
_EXACT = 2.0**53
"""From here on a double holds not every whole number: codes such as those of SNOMED CT have up to 18 digits."""


def beyond_double(value: str | float, number: float) -> int | None:
    """The whole number that a value is, all digits of it, where ``number``, the double of it, may be another one's too.
    None where that is exact."""
    if not _EXACT <= abs(number) < math.inf:
        return None
    if isinstance(value, str) and (whole := _WHOLE.fullmatch(value.strip())):
        return int(whole[1])
    return value if isinstance(value, int) else int(number)


def shown(cell: object) -> str:
    """A cell as the file has it."""
    return str(cell).removesuffix(_REFUSED)


def no_number(cell: object, otherwise: str = "") -> str:
    """What is said of it: "expected a number, got ...", and what of the site file may be wrong.

    Args:
        otherwise: what is said of a cell in which the decimal sign is not what is wrong.
    """
    if str(cell).endswith(_REFUSED):
        otherwise = " (with a point, where 'decimal' says that the decimal sign is a comma)"
    elif (found := as_number(shown(cell))) is not None and LARGEST < abs(found) < math.inf:
        return f"expected a number of at most {LARGEST:.2g}, got '{shown(cell)}'{otherwise}"
    elif _THOUSANDS.fullmatch(str(cell)):
        otherwise = (
            " (if its comma stands after thousands, write the number without it; if it is a decimal comma, declare "
            "'decimal: \",\"')"
        )
    elif has_comma(str(cell)):
        otherwise = " (if that is a decimal comma, declare 'decimal: \",\"')"
    elif str(cell).lstrip().startswith(tuple("<>≤≥")):
        otherwise = " (this is no missing value: write a number in its place, such as the limit or half of it)"
    return f"expected a number, got '{shown(cell)}'{otherwise}"


LARGEST = 3.4028234663852886e38
"""What single precision holds, in which everything is computed."""

MISSING = " (list it under 'missing' if it means not known)"
