# SPDX-License-Identifier: Apache-2.0
"""Pictures of a report say to who does not see them what they show."""

import re
from pathlib import Path

import pytest

from medpfl.compare.report import _template as of_comparison
from medpfl.results.report import _template as of_job


@pytest.mark.parametrize("template", [of_job, of_comparison])
def test_every_picture_has_words(template: object) -> None:
    """A screen reader read out the numbers along the axes of each, and not what they are."""
    path = template().filename  # type: ignore[operator]
    text = Path(path).read_text(encoding="utf-8")
    found = re.findall(r"<(\w+)([^>]*)>(?:\{\{ [\w.]+\|safe \}\})", text)
    assert len(found) > 3
    for tag, attributes in found:
        assert re.search(r'role="(img|figure)" aria-label="[^"]{12,}"', attributes), (tag, attributes)
