# SPDX-License-Identifier: Apache-2.0
"""With how many decimals the values of a metric are written: one rule for tables, sentences, cards, pages and figures.

Shares such as accuracy and Dice have three decimals. A metric with a unit can be of any size: with three decimals an
error of 0.004 mmol/L and another of 0.0044 would be the same.
"""

import math
from collections.abc import Iterable

USUAL = 3
"""Decimals, where the largest value is from 0.1 to below 1000."""
_MOST = 9
"""Values that are nearer to each other are equal (``measure.TOLERANCE``)."""


def digits(values: Iterable[float | None]) -> int:
    """Decimals for all values of a metric that are compared: three; where all are below 0.1, as many as give the
    largest three significant digits; where one is 1000 or more, as many as give it six."""
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    if not largest:
        return USUAL
    first = math.floor(math.log10(largest))  # the power of ten of the first digit
    return min(max(USUAL, 2 - first), _MOST, max(0, 5 - first))


def rounded(value: float) -> float:
    """What is kept of a value in a file or a message: six decimals, of a small one more; nothing has no sign."""
    return round(value, max(6, digits([value]) + 3)) + 0.0


def fewer(decimals: int) -> int:
    """One less: what sentences and intervals have, which need not tell close models apart."""
    return max(0, decimals - 1)


def amount(value: float) -> str:
    """An amount with three digits and no power of ten: "0.00008", "1.25", "12346" (of which all before the point)."""
    if not value:
        return "0"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def threshold_text(value: float, decimals: int) -> str:
    """A threshold of a probability: with more decimals where it would be written as 0 or 1, at which a rule finds
    everybody or nobody."""
    while 0 < value < 1 and round(value, decimals) in (0, 1):
        decimals += 1
    return f"{value:.{decimals}f}"
