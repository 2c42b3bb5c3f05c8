# SPDX-License-Identifier: Apache-2.0
"""The histograms on the data check's page."""

import re
from pathlib import Path

from medpfl.check import page
from medpfl.data.declared import SPLITS


def test_the_splits_differ_by_more_than_their_colours() -> None:
    """Who does not tell blue, orange and green apart saw three equal outlines."""
    text = Path(page.__file__).with_suffix(".html").read_text(encoding="utf-8")
    dashes = dict(re.findall(r"polygon\.(\w+) \{ stroke-dasharray: ([\d. ]+);", text))
    assert len({dashes.get(split, "") for split in SPLITS}) == len(SPLITS) == 3
