# SPDX-License-Identifier: Apache-2.0
"""Comparisons in the tests' own process."""

from collections.abc import Iterator

import pytest

from no_workers import without_workers


@pytest.fixture(scope="module")
def in_process() -> Iterator[None]:
    """The runner starts no processes."""
    with pytest.MonkeyPatch.context() as patch:
        without_workers(patch)
        yield
